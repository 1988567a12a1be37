"""Scheduling decisions, without a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from allspark_bus.prefix_keys import PrefixSalt
from allspark_bus.service_order import AGEING_S
from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.prefix_cache import PrefixCache
from allspark_workers.engine.scheduler import Scheduler
from allspark_workers.engine.sequence import NO_ROW, Sequence
from allspark_workers.engine.step_plan import Row, StepPlan
from allspark_workers.engine.types import EngineRequest, GenerationParams
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Maker = Callable[..., Sequence]
SPAN = 4
MAX_LENGTH = 64


def scheduler(spans: int = 100, max_batch: int = 4, budget: int = 8) -> Scheduler:
    return Scheduler(PageLedger(spans), SPAN, max_batch, budget, MAX_LENGTH)


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence.request_id, row.start, row.count, row.samples) for row in plan.rows]


def run(sched: Scheduler, plan: StepPlan) -> None:
    for row in plan.rows:
        sched.commit(row)
        if row.samples:
            row.sequence.append(1)


def step(sched: Scheduler) -> list[tuple[str, int, int, bool]]:
    plan = sched.schedule()
    run(sched, plan)
    sched.check()
    return shape(plan)


def test_a_prompt_is_chunked_then_decodes(make_sequence: Maker) -> None:
    sched = scheduler()
    sched.add(make_sequence(19, name="a"))
    assert step(sched) == [("a", 0, 8, False)]
    assert step(sched) == [("a", 8, 8, False)]
    assert step(sched) == [("a", 16, 3, True)]
    assert step(sched) == [("a", 19, 1, True)]


def test_decode_goes_first_and_prompts_share_the_budget(make_sequence: Maker) -> None:
    sched = scheduler()
    sched.add(make_sequence(3, name="a"))
    step(sched)
    sched.add(make_sequence(6, name="b"))
    sched.add(make_sequence(6, name="c"))
    assert step(sched) == [("a", 3, 1, True), ("b", 0, 6, True), ("c", 0, 2, False)]
    assert step(sched) == [("a", 4, 1, True), ("b", 6, 1, True), ("c", 2, 4, True)]


def test_waiting_requests_start_by_priority_then_arrival(make_sequence: Maker) -> None:
    sched = scheduler(max_batch=2)
    sched.add(make_sequence(2, name="late", arrival_s=2.0))
    sched.add(make_sequence(2, name="early", arrival_s=1.0))
    sched.add(make_sequence(2, name="urgent", arrival_s=3.0, priority=1))
    assert [name for name, *_ in step(sched)] == ["urgent", "early"]


def test_a_large_request_at_the_head_is_not_overtaken(make_sequence: Maker) -> None:
    sched = scheduler(spans=6, budget=100)
    sched.add(make_sequence(8, name="a"))
    step(sched)
    sched.add(make_sequence(20, name="big"))
    sched.add(make_sequence(2, name="small"))
    assert [name for name, *_ in step(sched)] == ["a"]
    sched.remove(sched.running[0])
    assert step(sched)[0] == ("big", 0, 20, True)


def test_admission_leaves_running_requests_room_to_grow(make_sequence: Maker) -> None:
    sched = scheduler(spans=2, budget=100)
    first = make_sequence(4, name="a")
    sched.add(first)
    sched.add(make_sequence(4, name="b", arrival_s=1.0))
    for _ in range(4):
        assert [name for name, *_ in step(sched)] == ["a"]
    assert sched.num_preemptions == 0
    sched.remove(first)
    assert step(sched) == [("b", 0, 4, True)]


def test_preemption_keeps_tokens_and_frees_spans_for_the_elder(make_sequence: Maker) -> None:
    sched = scheduler(spans=5, budget=100)
    elder = make_sequence(6, name="elder", arrival_s=0.0)
    younger = make_sequence(6, name="younger", arrival_s=1.0)
    sched.add(elder)
    sched.add(younger)
    assert [name for name, *_ in step(sched)] == ["elder", "younger"]
    while not sched.num_preemptions:
        step(sched)
    assert younger.row == NO_ROW and younger.spans == [] and younger.num_computed == 0
    length = younger.length
    assert length > 6
    sched.remove(elder)
    assert step(sched) == [("younger", 0, length, True)]


def test_a_request_alone_that_outgrows_the_pool_is_exhausted(make_sequence: Maker) -> None:
    sched = scheduler(spans=2, budget=100)
    seq = make_sequence(7, name="a")
    sched.add(seq)
    step(sched)
    step(sched)
    plan = sched.schedule()
    assert plan.exhausted == [seq] and plan.rows == []
    sched.remove(seq)
    assert sched.ledger.free == 2


def test_a_request_larger_than_the_pool_does_not_block_the_queue(make_sequence: Maker) -> None:
    sched = scheduler(spans=2, budget=100)
    giant = make_sequence(9, name="giant")
    sched.add(giant)
    sched.add(make_sequence(2, name="small", arrival_s=1.0))
    plan = sched.schedule()
    assert plan.exhausted == [giant]
    assert [row.sequence.request_id for row in plan.rows] == ["small"]


def test_higher_priority_takes_the_place_of_lower(make_sequence: Maker) -> None:
    sched = scheduler(max_batch=2)
    for name in ("a", "b"):
        sched.add(make_sequence(2, name=name))
    step(sched)
    sched.add(make_sequence(2, name="urgent", priority=5))
    sched.add(make_sequence(2, name="same"))
    assert [name for name, *_ in step(sched)] == ["a", "urgent"]
    assert sched.get("b") in sched.waiting


def test_priority_ages_while_a_request_waits(make_sequence: Maker) -> None:
    sched = scheduler(max_batch=1)
    sched.add(make_sequence(2, name="young", arrival_s=2 * AGEING_S + 1, priority=2))
    sched.add(make_sequence(2, name="old", arrival_s=0.0))
    assert [name for name, *_ in step(sched)] == ["old"]
    assert [name for name, *_ in step(sched)] == ["old"], "what has aged enough is not pre-empted either"
    assert sched.num_preemptions == 0
    sched.add(make_sequence(2, name="urgent", arrival_s=2 * AGEING_S + 1, priority=3))
    assert [name for name, *_ in step(sched)] == ["urgent"]


def test_priority_does_not_take_the_place_of_another_tenants_request(make_sequence: Maker) -> None:
    sched = scheduler(max_batch=2)
    sched.add(make_sequence(2, name="theirs", tenant="b"))
    sched.add(make_sequence(2, name="ours", tenant="a", priority=-1))
    step(sched)
    sched.add(make_sequence(2, name="urgent", tenant="a", priority=5))
    assert [name for name, *_ in step(sched)] == ["theirs", "urgent"]
    sched.add(make_sequence(2, name="more", tenant="a", priority=5))
    assert [name for name, *_ in step(sched)] == ["theirs", "urgent"]


def test_turns_of_tenants_are_kept_whatever_their_priorities(make_sequence: Maker) -> None:
    """A broker sends requests in turn, and keeps four waiting here; those of one tenant are all urgent."""
    sched = scheduler(max_batch=1)
    arrivals = [("sly" if n % 2 else "meek", n) for n in range(100)]
    served: list[str] = []
    while len(served) < 60:
        while len(sched) < 5:
            tenant, n = arrivals.pop(0)
            priority = 100 if tenant == "sly" else 0
            sched.add(make_sequence(2, name=f"{tenant}{n}", tenant=tenant, priority=priority, arrival_s=n))
        step(sched)
        [running] = sched.running
        served.append(running.request.tenant)
        sched.remove(running)
        sched.check()
        assert abs(served.count("sly") - served.count("meek")) <= 1, served


def test_who_overtakes_within_a_tenant_takes_its_turn_and_leaves_it_a_later_one(make_sequence: Maker) -> None:
    sched = scheduler(max_batch=1)
    sched.add(make_sequence(2, name="now", tenant="c"))
    step(sched)
    sched.add(make_sequence(2, name="low", tenant="a", priority=-1))
    sched.add(make_sequence(2, name="b1", tenant="b", priority=100))
    sched.add(make_sequence(2, name="high", tenant="a"))
    sched.add(make_sequence(2, name="b2", tenant="b", priority=100))
    served = []
    for _ in range(5):
        served.append(sched.running[0].request_id)
        sched.remove(sched.running[0])
        step(sched)
    assert served == ["now", "high", "b1", "low", "b2"]


def test_memory_is_taken_from_the_last_turn_and_there_from_the_lowest(make_sequence: Maker) -> None:
    """The urgent ones of tenant b came last, so they give way, though those of a are not urgent at all."""
    sched = scheduler(spans=8, budget=100)
    for tenant, priority in (("b", 0), ("a", -100), ("b", 100)):
        sched.add(make_sequence(6, name=f"{tenant}{priority}", tenant=tenant, priority=priority))
        step(sched)
    while not sched.num_preemptions:
        step(sched)
    assert [seq.request_id for seq in sched.waiting] == ["b0"]
    sched.check()


def test_lower_priority_is_not_preempted_in_vain(make_sequence: Maker) -> None:
    sched = scheduler(spans=6, budget=100)
    sched.add(make_sequence(12, name="equal", priority=5))
    sched.add(make_sequence(4, name="low"))
    step(sched)
    sched.add(make_sequence(16, name="urgent", priority=5, arrival_s=1.0))
    assert [name for name, *_ in step(sched)] == ["equal", "low"]


def test_held_requests_rest_and_are_the_first_victims(make_sequence: Maker) -> None:
    sched = scheduler(spans=5, budget=100)
    held = make_sequence(6, name="held", arrival_s=0.0)
    other = make_sequence(6, name="other", arrival_s=1.0)
    sched.add(held)
    sched.add(other)
    step(sched)
    held.is_held = True
    while not sched.num_preemptions:
        assert [name for name, *_ in step(sched)] == ["other"]
    assert held.row == NO_ROW and held.length == 7
    other.is_held = True
    assert not sched.has_work()
    held.is_held = False
    assert sched.has_work()


def test_deadlines_are_found(make_sequence: Maker) -> None:
    sched = scheduler()
    soon = make_sequence(2, name="soon", deadline_s=5.0)
    sched.add(soon)
    sched.add(make_sequence(2, name="later", deadline_s=9.0))
    sched.add(make_sequence(2, name="never"))
    assert sched.next_wake_s() == 5.0
    assert sched.expired(4.9) == []
    assert sched.expired(5.0) == [soon]
    sched.remove(soon)
    assert sched.next_wake_s() == 9.0


REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 2), st.integers(0, 30)),
    min_size=1,
    max_size=12,
)


def _request(index: int, prompt: int, new: int, priority: int) -> Sequence:
    ids = list(range(prompt))
    params = GenerationParams(max_length=prompt + new)
    request = EngineRequest(f"r{index}", 1, np.asarray(ids, np.int64), params, priority=priority)
    return Sequence(request, index)


class Memory:
    """What is in the KV cache: for every slot, a hash of the tokens up to the one whose K and V it holds."""

    num_slots = 3

    def __init__(self, spans: int) -> None:
        self.device = np.zeros((spans, SPAN), np.int64)
        self.host = np.zeros((self.num_slots, SPAN), np.int64)

    def save(self, span: int, slot: int) -> None:
        self.host[slot] = self.device[span]

    def load(self, slot: int, span: int) -> None:
        self.device[span] = self.host[slot]

    def compute(self, row: Row) -> None:
        """Check that what the row reads is there, and write what it computes."""
        seq, state = row.sequence, 0
        for position in range(row.start + row.count):
            state = hash((state, int(seq.tokens[position])))
            where = seq.spans[position // SPAN], position % SPAN
            if position < row.start:
                assert self.device[where] == state, f"{seq.request_id} reads other KV at {position}"
            else:
                self.device[where] = state


class Steps:
    """A clock that counts steps."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return float(self.now)


@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    spans=st.integers(2, 14),
    max_batch=st.integers(1, 5),
    budget=st.integers(1, 20),
    ttl_s=st.sampled_from([None, 0.0, 7.0, 1e6]),
    is_tiered=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_every_request_ends_and_the_ledger_balances(
    requests: list[tuple[int, int, int, int]],
    spans: int,
    max_batch: int,
    budget: int,
    ttl_s: float | None,
    is_tiered: bool,
    random: object,
) -> None:
    """Arrivals, holds and cancellations at random: everything ends, every token is computed in order.

    All prompts have a common beginning, so with a prefix cache (`ttl_s`) requests share whatever they can.
    """
    clock, memory = Steps(), Memory(spans)
    sched = Scheduler(PageLedger(spans), SPAN, max_batch, budget, MAX_LENGTH)
    if ttl_s is not None:
        host = memory if is_tiered else None
        sched.prefix = PrefixCache(sched.ledger, PrefixSalt("m", SPAN), ttl_s, clock, host)
    pending = [(at, _request(i, *rest)) for i, (*rest, at) in enumerate(requests)]
    ended: dict[str, str] = {}
    for now in range(3000):
        clock.now = now
        for _, seq in [item for item in pending if item[0] <= now]:
            sched.add(seq)
        pending = [item for item in pending if item[0] > now]
        if now < 200:
            _disturb(sched, random, ended)
        else:
            for seq in sched:
                seq.is_held = False
        _one_step(sched, budget, ended, memory)
        if not pending and not len(sched):
            break
    assert len(ended) == len(requests), f"still live: {[s.request_id for s in sched]}"
    assert sched.ledger.free == spans


def _disturb(sched: Scheduler, random: object, ended: dict[str, str]) -> None:
    for seq in sched:
        draw = random.random()  # type: ignore[attr-defined]
        if draw < 0.05:
            seq.is_held = not seq.is_held
        elif draw < 0.06:
            sched.remove(seq)
            ended[seq.request_id] = "stopped"


def _one_step(sched: Scheduler, budget: int, ended: dict[str, str], memory: Memory) -> None:
    plan = sched.schedule()
    if sched.prefix is not None:
        sched.prefix.load_restored()
    sched.check()
    assert sum(row.count for row in plan.rows if row.sequence.num_remaining > 1) <= budget
    assert len({row.sequence.request_id for row in plan.rows}) == len(plan.rows) <= sched.max_batch
    for seq in plan.exhausted:
        assert sched.spans_for(seq.length) > sched.ledger.total
        sched.remove(seq)
        ended[seq.request_id] = "exhausted"
    for row in plan.rows:
        _check_row(row, sched.span_table)
    for row in plan.rows:
        memory.compute(row)
    for row in plan.rows:
        sched.commit(row)
        if row.samples:
            row.sequence.append(1)
            if row.sequence.length >= row.sequence.request.params.max_length:
                sched.remove(row.sequence)
                ended[row.sequence.request_id] = "length"
    sched.check()


def _check_row(row: Row, table: NDArray[np.int32]) -> None:
    seq = row.sequence
    assert not seq.is_held and seq.row != NO_ROW
    assert row.start == seq.num_computed and row.count >= 1
    assert len(seq.spans) * SPAN >= row.start + row.count
    assert table[seq.row, : len(seq.spans)].tolist() == seq.spans
    assert row.samples == (row.start + row.count == seq.length)
