"""The worker table."""

from allspark_broker.workers import Flight, WorkerTable
from allspark_proto import fleet_pb2 as fleet


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def announce(*held: tuple[str, int], capacity: int = 2, state: str = "running") -> fleet.Announce:
    return fleet.Announce(
        device="cpu",
        models=[fleet.WorkerModel(name="m", state=state, capacity=capacity)],
        held=[fleet.HeldRequest(request_id=r, epoch=e, model="m") for r, e in held],
    )


def test_silence_during_the_brokers_own_stall_does_not_count() -> None:
    clock = Clock()
    table = WorkerTable(1.0, clock)
    worker, _ = table.announce("w", announce())
    worker.flights["r"] = Flight("r", "m", 1, clock())
    clock.now = 8.0
    table.excuse(7.5)
    assert not table.dead() and not table.unacknowledged(1.0)
    clock.now = 9.0
    assert table.dead() == [worker] and table.unacknowledged(1.0) == [(worker, worker.flights["r"])]


def test_busy_and_idle_workers_expire_alike() -> None:
    clock = Clock()
    table = WorkerTable(1.0, clock)
    busy, _ = table.announce("busy", announce(("r", 1)))
    table.announce("idle", announce())
    clock.now = 0.9
    assert table.dead() == []
    table.seen(busy)
    clock.now = 1.5
    assert [w.worker_id for w in table.dead()] == ["idle"]
    clock.now = 2.0
    assert {w.worker_id for w in table.dead()} == {"busy", "idle"}


def test_a_worker_whose_connection_is_gone_is_dead_before_it_is_silent() -> None:
    table = WorkerTable(100.0, Clock())
    worker, _ = table.announce("w", announce())
    worker.unreachable = 2
    assert table.dead() == [worker]
    table.seen(worker)
    assert table.dead() == []


def test_choice_is_the_least_loaded_with_room() -> None:
    table = WorkerTable(1.0, Clock())
    a, _ = table.announce("a", announce())
    b, _ = table.announce("b", announce())
    table.announce("c", announce(state="built"))
    order = []
    while (worker := table.choose("m")) is not None:
        order.append(worker.worker_id)
        worker.flights[f"r{len(order)}"] = Flight(f"r{len(order)}", "m", 1, 0.0)
    assert order == ["a", "b", "a", "b"]
    a.draining = True
    del a.flights["r1"]
    assert table.choose("m") is None
    del b.flights["r2"]
    assert table.choose("m", excluding=["b"]) is None
    assert table.choose("unknown") is None


def test_a_worker_that_swallowed_a_dispatch_comes_last_until_it_announces_itself() -> None:
    table = WorkerTable(100.0, Clock())
    mute, _ = table.announce("a", announce())
    other, _ = table.announce("b", announce())
    mute.is_mute = True
    other.flights["r"] = Flight("r", "m", 1, 0.0)
    assert table.choose("m") is other, "though it has more to do"
    assert table.choose("m", prefer={"a": 100}) is other
    assert table.choose("m", excluding=["b"]) is mute, "better than nobody"
    table.announce("a", announce())
    assert table.choose("m") is mute


def test_an_unreachable_worker_is_offered_nothing_until_it_speaks() -> None:
    table = WorkerTable(100.0, Clock())
    worker, _ = table.announce("w", announce())
    worker.unreachable = 1
    assert table.choose("m") is None
    table.seen(worker)
    assert table.choose("m") is worker


def test_an_announcement_settles_what_was_lost_on_the_way() -> None:
    clock = Clock()
    table = WorkerTable(1.0, clock)
    worker, _ = table.announce("w", announce())
    for rid, accepted in (("kept", True), ("gone", True), ("sent", False)):
        worker.flights[rid] = Flight(rid, "m", 1, 0.0, accepted)
    _, lost = table.announce("w", announce(("kept", 1), ("adopted", 3)))
    assert [f.request_id for f in lost] == ["gone"]
    assert set(worker.flights) == {"kept", "sent", "adopted"}
    clock.now = 5.0
    assert [f.request_id for _, f in table.unacknowledged(2.0)] == ["sent"]
    assert table.holding("adopted") == (worker, worker.flights["adopted"])


def heartbeat(store_silent_s: float) -> fleet.WorkerHeartbeat:
    return fleet.WorkerHeartbeat(models=announce().models, store_silent_s=store_silent_s)


def test_a_worker_that_does_not_reach_the_store_gets_nothing_and_keeps_nothing() -> None:
    table = WorkerTable(5.0, Clock())
    cut_off, _ = table.announce("a", announce(("held", 1)))
    table.heartbeat(cut_off, heartbeat(1.9))
    assert table.choose("m") is cut_off
    table.heartbeat(cut_off, heartbeat(3.1))
    assert table.choose("m") is None
    assert table.without_store() == [], "nobody else could serve it"
    other, _ = table.announce("b", announce())
    assert table.without_store() == [cut_off]
    assert table.choose("m") is other
    table.heartbeat(cut_off, heartbeat(2.9))
    assert table.without_store() == [], "it may come back"
    table.heartbeat(cut_off, heartbeat(3.1))
    table.heartbeat(other, heartbeat(3.0))
    assert table.without_store() == [], "the other one fares no better"
    table.heartbeat(cut_off, heartbeat(0.0))
    assert table.choose("m") is cut_off


def test_a_worker_that_another_broker_fills_is_full() -> None:
    table = WorkerTable(5.0, Clock())
    worker, _ = table.announce("w", announce())
    capacity = worker.free_capacity("m")
    for i in range(capacity):
        table.accepted(worker, fleet.Accepted(request_id=f"r{i}", epoch=2, model="m"))
    assert table.choose("m") is None
    table.accepted(worker, fleet.Accepted(request_id="r0", epoch=1, model="m"))
    assert worker.flights["r0"].epoch == 2, "an older attempt says nothing about this one"
    table.accepted(worker, fleet.Accepted(request_id="r0", epoch=3, model="m"))
    assert worker.flights["r0"].epoch == 3
    table.accepted(worker, fleet.Accepted(request_id="old", epoch=1))
    assert "old" not in worker.flights, "of which model?"
