"""The queue of a model: shares of tenants, ranks within one, ageing, deadlines, the bound."""

from itertools import pairwise

import hypothesis.strategies as st
from allspark_broker.lazy_heap import LazyHeap
from allspark_broker.queue import MAX_REMEMBERED, Ahead, RequestQueue, Waiting
from allspark_broker.work import Work
from allspark_bus.service_order import AGEING_S, rank
from hypothesis import given, settings

WEIGHTS = {"a": 1.0, "b": 2.5, "c": 0.5, "d": 1.0}
MAX_WORK = 100
AGEING_MS = int(AGEING_S * 1000)


def waiting(rid: str, work: int = 1, priority: int = 0, created_ms: int = 0, deadline_ms: int = 0) -> Waiting:
    return Waiting(rid, 0, priority, created_ms, deadline_ms, work=Work(0, work))


def serve(queue: RequestQueue) -> str:
    """The id that is served next; "" if nobody waits."""
    request = queue.peek()
    if request is None:
        return ""
    queue.serve(request)
    return request.request_id


def fill(queue: RequestQueue, tenant: str, count: int, work: int = 1, priority: int = 0) -> None:
    for i in range(count):
        queue.push(waiting(f"{tenant}/{i}", work, priority, created_ms=i))


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abcd"), st.integers(1, MAX_WORK), st.integers(-3, 3)),
        st.tuples(st.just("serve"), st.just(""), st.just(0), st.just(0)),
        st.tuples(st.just("direct"), st.sampled_from("abcd"), st.integers(1, MAX_WORK), st.just(0)),
        st.tuples(st.just("remove"), st.sampled_from("abcd"), st.integers(0, 200), st.just(0)),
    ),
    max_size=150,
)


class History:
    """Replays operations, and remembers what was served and since when each tenant has been waiting."""

    def __init__(self) -> None:
        self.queue = RequestQueue(10_000, WEIGHTS.__getitem__)
        self.model: dict[str, Waiting] = {}
        self.served: list[tuple[str, int]] = []
        self.since: dict[str, int] = {}  # tenant -> number of turns before its backlog began
        self.clock = 0

    def run(self, op: str, tenant: str, number: int, priority: int) -> None:
        self.clock += 1000
        if op == "push":
            request = waiting(f"{tenant}/{self.clock}", number, priority, self.clock)
            self.queue.push(request)
            self.model[request.request_id] = request
        elif op == "serve":
            rid = serve(self.queue)
            assert bool(rid) == bool(self.model), "nobody is served although somebody waits"
            if rid:
                taken = self.model.pop(rid)
                mates = [w for w in self.model.values() if w.tenant == taken.tenant]
                assert all(taken.rank <= mate.rank for mate in mates)
                self.served.append((taken.tenant, taken.work.tokens))
        elif op == "direct" and not self.model:
            self.queue.charge(tenant, Work(0, number))
        elif op == "remove" and self.model:
            rid = sorted(self.model)[number % len(self.model)]
            assert self.queue.remove(rid)
            del self.model[rid]
        self.queue.check()
        assert len(self.queue) == len(self.model)
        backlogged = {w.tenant for w in self.model.values()}
        self.since = {t: self.since.get(t, len(self.served)) for t in backlogged}

    def check_fairness(self) -> None:
        """Theorem 1 of the paper over every interval that ends now and throughout which both waited."""
        for f in self.since:
            for m in self.since:
                lead = 0.0
                for tenant, work in reversed(self.served[max(self.since[f], self.since[m]) :]):
                    lead += (tenant == f) * work / WEIGHTS[f] - (tenant == m) * work / WEIGHTS[m]
                    assert lead <= MAX_WORK / WEIGHTS[f] + MAX_WORK / WEIGHTS[m] + 1e-6


@given(OPS)
@settings(deadline=None)
def test_tenants_that_wait_are_served_in_proportion_and_a_tenants_own_by_rank(
    ops: list[tuple[str, str, int, int]],
) -> None:
    history = History()
    for op in ops:
        history.run(*op)
        history.check_fairness()


@given(OPS, st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_the_order_depends_on_nothing_but_the_history(
    ops: list[tuple[str, str, int, int]], extra: int
) -> None:
    first, second = History(), History()
    for op in [*ops, *[("serve", "", 0, 0)] * extra]:
        first.run(*op)
        second.run(*op)
    assert first.served == second.served


def test_shares_follow_the_weights_whatever_the_sizes() -> None:
    queue = RequestQueue(10_000, {"small": 1.0, "large": 1.0, "double": 2.0}.__getitem__)
    fill(queue, "small", 4000, work=1)
    fill(queue, "large", 100, work=50)
    fill(queue, "double", 1000, work=10)
    work = dict.fromkeys(("small", "large", "double"), 0)
    while sum(work.values()) < 4000:
        request = queue.peek()
        assert request is not None
        work[request.tenant] += request.work.tokens
        queue.serve(request)
    assert abs(work["small"] - 1000) <= 60
    assert abs(work["large"] - 1000) <= 60
    assert abs(work["double"] - 2000) <= 120


def test_priorities_win_nothing_from_other_tenants() -> None:
    queue = RequestQueue(100)
    fill(queue, "loud", 10, priority=100)
    fill(queue, "quiet", 10, priority=-100)
    turns = [serve(queue).partition("/")[0] for _ in range(20)]
    assert all(set(pair) == {"loud", "quiet"} for pair in pairwise(turns))


def test_a_tenant_that_was_away_does_not_save_up_its_share() -> None:
    queue = RequestQueue(1000)
    fill(queue, "busy", 500)
    for _ in range(200):
        serve(queue)
    fill(queue, "back", 100)
    turns = [serve(queue).partition("/")[0] for _ in range(40)]
    assert turns.count("back") in (19, 20, 21)


def test_leaving_and_coming_back_does_not_clear_what_was_charged() -> None:
    queue = RequestQueue(1000)
    fill(queue, "other", 100, work=10)
    queue.push(waiting("sly/0", work=90))
    turns = []
    while len(turns) < 20:
        turns.append(serve(queue).partition("/")[0])
        if "sly/next" not in queue:
            queue.push(waiting("sly/next", work=90))
    assert turns.count("sly") <= 3, turns


def test_what_goes_to_a_worker_at_once_counts_too() -> None:
    queue = RequestQueue(100)
    for _ in range(5):
        queue.charge("a", Work(4, 6))
    queue.push(waiting("a/1", 10, created_ms=1))
    queue.push(waiting("b/1", 10, created_ms=2))
    assert [serve(queue), serve(queue)] == ["b/1", "a/1"]


def test_what_comes_back_from_a_worker_goes_first_and_is_not_charged_again() -> None:
    queue = RequestQueue(2)
    fill(queue, "a", 2)
    fill(queue, "b", 2)
    back = waiting("b/back", work=50, priority=-5, created_ms=99)
    back.was_served = True
    queue.push(back)
    assert [serve(queue) for _ in range(5)] == ["b/back", "a/0", "b/0", "a/1", "b/1"]


def test_ageing_lets_nothing_starve() -> None:
    """The lowest priority against a never-ending stream of the highest."""
    queue = RequestQueue(10_000)
    queue.push(waiting("t/low", priority=-100, created_ms=0))
    order, now_ms = [], 0
    while "t/low" in queue:
        now_ms += AGEING_MS
        queue.push(waiting(f"t/{now_ms}", priority=100, created_ms=now_ms))
        order.append(serve(queue))
        assert now_ms <= 201 * AGEING_MS, "200 levels are 200 times the ageing time"
    assert len(order) > 190, "priority counts for as long as that"


@given(
    st.integers(-100, 100), st.integers(-100, 100), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)
)
def test_the_rank_orders_by_priority_plus_age_at_any_time(
    p: int, q: int, arrived: float, came: float, later: float
) -> None:
    now = max(arrived, came) + later
    mine, other = p + (now - arrived) / AGEING_S, q + (now - came) / AGEING_S
    if abs(mine - other) > 1e-6:
        assert (rank(p, arrived) < rank(q, came)) == (mine > other)


def test_expired_requests_are_found_whoever_they_belong_to_and_however_often_they_moved() -> None:
    queue = RequestQueue(100)
    for i in range(40):
        queue.push(waiting(f"t{i % 3}/{i}", deadline_ms=1000 - 10 * i))
    queue.push(waiting("t0/none"))
    queue.push(waiting("t0/0", deadline_ms=5000))
    queue.remove("t1/1")
    assert {w.request_id for w in queue.expired(990)} == {f"t{i % 3}/{i}" for i in range(2, 40)}
    assert [w.request_id for w in queue.expired(610)] == ["t0/39"]
    assert queue.expired(609) == []
    queue.check()


def test_a_full_queue_denies_who_has_his_share_and_admits_who_has_not() -> None:
    queue = RequestQueue(12, {"a": 1.0, "b": 1.0, "c": 2.0}.__getitem__)
    fill(queue, "a", 11)
    assert queue.has_room("a")
    queue.push(waiting("a/last"))
    assert not queue.has_room("a") and queue.has_room("b") and queue.has_room("c")
    for i in range(6):
        assert queue.has_room("b")
        queue.push(waiting(f"b/{i}"))
    assert not queue.has_room("b")
    for i in range(6):
        assert queue.has_room("c")
        queue.push(waiting(f"c/{i}"))
    assert not queue.has_room("c"), "half of twelve for half of the weight"
    assert len(queue) == 24, "nobody was dropped"
    while len(queue) >= 12:
        serve(queue)
    assert queue.has_room("a")


def test_places_of_requests_that_are_being_recorded_are_taken() -> None:
    queue = RequestQueue(4)
    for _ in range(4):
        queue.promise("a")
    assert not queue.has_room("a"), "all of the places"
    queue.withdraw("a")
    assert queue.has_room("a")
    queue.promise("a")
    queue.push(waiting("b/0"))
    assert queue.has_room("b")
    queue.push(waiting("b/1"))
    assert not queue.has_room("b")
    queue.check()


def test_how_many_are_ahead_follows_from_the_turns() -> None:
    queue = RequestQueue(100, {"a": 1.0, "b": 2.0, "new": 1.0}.__getitem__)
    fill(queue, "a", 10, work=5, priority=1)
    fill(queue, "b", 10, work=7)
    assert queue.ahead_of("a", 1) == Ahead(10 + 10, 0, 10 * 5 + 10 * 7)
    assert queue.ahead_of("a", 2) == Ahead(2, 0, 2 * 7)
    assert queue.ahead_of("new", -100) == Ahead(1 + 2, 0, 5 + 2 * 7)
    queue.push(Waiting("b/back", 1, 0, 0, was_served=True, work=Work(3, 4)))
    assert queue.ahead_of("new", 0) == Ahead(1 + 1 + 2, 3, 4 + 5 + 2 * 7)
    queue.remove("b/back")
    queue.promise("new")
    assert queue.ahead_of("new", 0) == Ahead(1 + 2 + 4, 0, 2 * 5 + 4 * 7, unknown=1)


def test_the_bound_holds_however_many_tenants_there_are() -> None:
    queue = RequestQueue(50)
    for round_ in range(60):
        for tenant in range(200):
            if queue.has_room(f"t{tenant}"):
                queue.push(waiting(f"t{tenant}/{round_}"))
    harmonic = sum(1 / k for k in range(1, 51))
    assert 50 <= len(queue) <= 50 * harmonic


def test_memory_is_bounded_when_tenants_come_and_go() -> None:
    queue = RequestQueue(10)
    for i in range(3 * MAX_REMEMBERED):
        queue.charge(f"t{i}", Work(0, 10))
    assert len(queue._finish) <= MAX_REMEMBERED
    queue.push(waiting("x/y"))
    for _ in range(10_000):
        queue.push(waiting("a/b", deadline_ms=5))
        queue.remove("a/b")
    assert max(len(h._heap) for h in (queue._turns, queue._deadlines)) < 200


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.booleans()), max_size=80))
def test_the_heap_against_a_plain_dictionary(ops: list[tuple[str, int, bool]]) -> None:
    heap, model = LazyHeap(), {}
    for serial, (key, number, is_push) in enumerate(ops):
        if is_push:
            heap.push(key, number)
            model[key] = number, serial
        else:
            assert heap.remove(key) == (model.pop(key, None) is not None)
        assert heap.first() == min(model, key=lambda k: model[k], default=None)
        assert sorted(heap.up_to(4)) == sorted(k for k in model if model[k][0] <= 4)
        heap.check()
