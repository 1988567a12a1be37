"""Who takes over a request that nobody attends to, and when; real Valkey, own clock."""

import pytest
from allspark_broker.orphans import CONFIRM_S, STALE_S, TTL_S
from allspark_broker.work import Work
from allspark_bus import keys
from allspark_bus.ledger import RELEASE, Append, Ending, now_ms
from allspark_bus.store import Store
from allspark_proto import fleet_pb2 as fleet

from tests.broker.parts import RID, Broker
from tests.fleet.harness import request


async def test_a_retry_of_what_a_worker_holds_leaves_it_there(store: Store) -> None:
    broker = Broker("one", store)
    model = fleet.WorkerModel(name="m", state="running", capacity=4)
    held = fleet.HeldRequest(request_id=RID, epoch=1, model="m")
    broker.table.announce("w", fleet.Announce(models=[model], held=[held]))
    place = broker.dispatcher.reserve(request("u", [1], 3), RID, Work(1, 3))
    broker.dispatcher.give_up(place, "m", RID)
    assert broker.table.holding(RID) is not None


@pytest.fixture
async def other(store: Store) -> Broker:
    """The broker whose requests become orphans."""
    return await Broker("other", store).settled()


@pytest.fixture
async def broker(store: Store, other: Broker) -> Broker:
    found = await Broker("broker", store).settled()
    found.announce("w")
    return found


async def test_what_a_broker_had_queued_is_taken_over_when_it_is_gone(broker: Broker, other: Broker) -> None:
    await other.admit()
    for _ in range(5):
        await broker.attend(6.0)
    assert broker.link.dispatched == [], "its broker lives"
    await other.presence.leave()
    await broker.attend()
    assert broker.link.dispatched == [("w", RID)]


async def test_what_was_on_a_worker_that_is_gone_too_is_taken_over_at_once(
    broker: Broker, other: Broker
) -> None:
    await other.admit("dead")
    await other.presence.leave()
    await broker.attend()
    assert broker.link.dispatched == [("w", RID)]


async def test_what_a_live_worker_holds_stays_there(broker: Broker, other: Broker) -> None:
    await other.admit("w")
    await other.presence.leave()
    await broker.attend()
    assert broker.num_asked == 1, "workers tell again what they hold"
    broker.announce("w", (RID, 1))
    for _ in range(5):
        await broker.attend(6.0)
    assert broker.link.dispatched == []


async def test_what_a_live_worker_never_got_is_taken_over_a_moment_later(
    broker: Broker, other: Broker
) -> None:
    await other.admit("w")
    await other.presence.leave()
    await broker.attend()
    assert broker.link.dispatched == [], "it may just be arriving"
    broker.announce("w")
    await broker.attend(2 * CONFIRM_S)
    assert broker.link.dispatched == [("w", RID)]


async def test_what_a_broker_lost_itself_is_found_again(broker: Broker) -> None:
    await broker.admit()
    await broker.attend(6.0)
    assert broker.link.dispatched == []
    await broker.attend(2 * CONFIRM_S)
    assert broker.link.dispatched == [("w", RID)]


async def test_after_an_outage_nobody_is_judged_by_their_silence(
    broker: Broker, other: Broker, store: Store
) -> None:
    await other.admit()
    await store.command("DEL", keys.BROKERS)  # as after a time in which nobody could speak
    await broker.attend(6.0)
    await other.attend(6.0)
    await broker.attend(TTL_S)
    assert broker.link.dispatched == []
    await other.presence.leave()
    await broker.attend()
    assert broker.link.dispatched == [("w", RID)]


async def test_index_entry_without_its_request_is_removed_but_not_while_an_admission_may_be_on_its_way(
    broker: Broker, store: Store
) -> None:
    await broker.admit()
    await store.script(RELEASE, [keys.request(RID), keys.stream(RID)], [now_ms()])  # and its broker died
    await broker.attend(6.0)
    await broker.attend(6.0)
    await broker.admit()
    await broker.ledger.append([Append(RID, "m", 1, 0, (5,), Ending(3, "eos"))])
    assert await broker.ledger.num_open("m") == 1, "the entry of the first life"
    await broker.attend(2 * STALE_S)
    assert await broker.ledger.num_open("m") == 0
