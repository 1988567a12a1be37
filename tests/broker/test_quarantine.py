"""A request that two workers were lost with: it waits until it is certain that they died; own clock."""

import pytest
from allspark_broker.quarantine import CLOSED_S, HEARD_S, SILENT_TIMEOUTS
from allspark_bus.ledger import Append, Ending, now_ms
from allspark_bus.losses import Suspect
from allspark_bus.store import Store
from allspark_bus.streams import Streams
from allspark_proto import allspark_service_pb2 as pb

from tests.broker.parts import RID, TIMEOUT_S, Broker

SILENT_S = SILENT_TIMEOUTS * TIMEOUT_S


@pytest.fixture
async def broker(store: Store) -> Broker:
    """Has lost the worker that had the request, and now the second one, which it was sent to then."""
    broker = await Broker("broker", store).settled()
    broker.announce("first")
    await broker.admit()
    await broker.dispatcher.claim(RID, 0)
    await lose(broker, "first")
    broker.announce("second")
    await broker.dispatcher.pump_all()
    assert broker.link.dispatched == [("first", RID), ("second", RID)]
    return broker


async def lose(broker: Broker, worker_id: str, doubt_s: float = SILENT_S) -> None:
    worker = broker.table.remove(worker_id)
    assert worker is not None and RID in worker.flights
    await broker.dispatcher.bury(worker, doubt_s)


async def epochs(broker: Broker) -> int:
    entry = await broker.ledger.load(RID)
    assert entry is not None
    return entry.epoch


async def look(broker: Broker, seconds_later: float = 0.0) -> None:
    broker.clock.now += seconds_later
    await broker.dispatcher.quarantine.look()


async def end(store: Store) -> tuple[int, str]:
    view = await Streams(store).view(RID)
    return view.status, view.reason


@pytest.mark.parametrize("doubt_s", [CLOSED_S, SILENT_S])
async def test_a_request_that_killed_two_workers_is_quarantined(
    broker: Broker, store: Store, doubt_s: float
) -> None:
    await lose(broker, "second", doubt_s)
    broker.announce("third")
    for _ in range(3):
        await look(broker)
        await broker.attend(0.3 * doubt_s)
    assert await end(store) == (pb.Init, "")
    await look(broker, 0.2 * doubt_s)
    assert await end(store) == (pb.GenerateInterrupted, "poison")
    assert "first, second" in (await Streams(store).view(RID)).message
    assert len(broker.link.dispatched) == 2, "it was tried on nobody else"
    assert RID not in broker.dispatcher.quarantine


@pytest.mark.parametrize("alive", ["first", "second"])
async def test_it_goes_on_when_one_of_the_two_was_only_cut_off(
    broker: Broker, store: Store, alive: str
) -> None:
    epoch = await epochs(broker)
    await lose(broker, "second")
    broker.announce("third")
    await look(broker)
    assert len(broker.link.dispatched) == 2
    assert await broker.ledger.losses.survived([(RID, epoch if alive == "second" else epoch - 2)]) == [False]
    await look(broker)
    assert broker.link.dispatched[2:] == [("third", RID)]
    await look(broker, 2 * SILENT_S)
    assert await end(store) == (pb.Init, "")
    await lose(broker, "third")
    await look(broker, SILENT_S)
    assert await end(store) == (pb.GenerateInterrupted, "poison"), "the other one counts"


async def test_a_worker_that_never_got_the_request_is_cleared_by_being_heard(
    broker: Broker, store: Store
) -> None:
    """Its dispatch was lost in the cut, so it has nothing to take back."""
    await lose(broker, "second")
    broker.announce("second")
    await look(broker)
    assert len(broker.link.dispatched) == 2, "that may have been on its way when it died"
    await look(broker, HEARD_S)
    broker.clock.now += 0.1
    broker.announce("second")
    await look(broker)
    assert broker.link.dispatched[2:] == [("second", RID)]
    [suspect] = await broker.ledger.losses.suspects([RID])
    assert isinstance(suspect, Suspect) and [worker for _, worker in suspect.lost] == ["first"]
    await lose(broker, "second")
    broker.announce("third")
    broker.clock.now += 2 * HEARD_S
    broker.announce("third")
    await look(broker, SILENT_S)
    assert await end(store) == (pb.GenerateInterrupted, "poison"), "whoever else is heard"


async def test_a_broker_that_takes_it_over_does_not_run_it_a_third_time(broker: Broker, store: Store) -> None:
    await lose(broker, "second")
    other = await Broker("other", store).settled()
    other.announce("third")
    await other.attend()
    await broker.presence.leave()
    await other.attend(10.0)
    assert RID in other.dispatcher.quarantine and not other.link.dispatched
    await look(other, SILENT_S)
    assert await end(store) == (pb.GenerateInterrupted, "poison")
    await look(broker, SILENT_S)
    assert RID not in broker.dispatcher.quarantine


async def test_what_is_stopped_meanwhile_stays_so(broker: Broker, store: Store) -> None:
    await lose(broker, "second")
    await broker.ledger.finish(RID, Ending(pb.GenerateFinished, "stopped"))
    await look(broker, SILENT_S)
    assert await end(store) == (pb.GenerateFinished, "stopped")
    assert RID not in broker.dispatcher.quarantine


async def test_a_deadline_that_passes_meanwhile_is_kept(store: Store) -> None:
    broker = await Broker("broker", store).settled()
    await broker.admit("first", deadline_ms=now_ms() - 1)
    epoch = await epochs(broker)
    await broker.ledger.advance(RID, epoch, "", died=True)
    await broker.dispatcher.claim(RID, epoch + 1, doubt_s=SILENT_S)
    assert RID in broker.dispatcher.quarantine
    await look(broker)
    assert await end(store) == (pb.GenerateInterrupted, "deadline")


async def test_a_worker_that_says_goodbye_was_not_killed(broker: Broker) -> None:
    worker = broker.table.remove("second")
    assert worker is not None
    broker.announce("third")
    await broker.dispatcher.bury(worker, None)
    assert broker.link.dispatched[2:] == [("third", RID)]
    [suspect] = await broker.ledger.losses.suspects([RID])
    assert isinstance(suspect, Suspect) and [worker for _, worker in suspect.lost] == ["first"]


async def test_a_broker_that_cannot_hear_a_worker_leaves_it_what_another_broker_sent_it(store: Store) -> None:
    one, other = await Broker("one", store).settled(), await Broker("other", store).settled()
    other.announce("w")
    await other.admit()
    await other.dispatcher.claim(RID, 0)
    epoch = await epochs(other)
    one.announce("w", (RID, epoch))
    one.announce("elsewhere")
    worker = one.table.remove("w")
    assert worker is not None
    await one.dispatcher.bury(worker, SILENT_S, brokers=frozenset({"other"}))
    assert await epochs(one) == epoch and not one.link.dispatched
    assert (await other.ledger.append([Append(RID, "m", epoch, 0, [5])])) == [(0, 1)]
    worker.flights = dict(other.table.get("w").flights)  # type: ignore[union-attr]
    for flight in worker.flights.values():
        flight.is_ours = False
    await one.dispatcher.bury(worker, SILENT_S, brokers=frozenset())
    assert one.link.dispatched == [("elsewhere", RID)], "with its broker gone it is claimed"
