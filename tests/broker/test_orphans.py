"""Who takes over a request that nobody attends to, and when; real Valkey, own clock."""

import pytest
from allspark_broker.affinity import PrefixAffinity
from allspark_broker.dispatcher import Dispatcher
from allspark_broker.orphans import CONFIRM_S, STALE_S, TTL_S, Orphans
from allspark_broker.queue import RequestQueue
from allspark_broker.work import Work
from allspark_broker.workers import WorkerTable
from allspark_bus import keys
from allspark_bus.ledger import RELEASE, Append, Ending, Entry, Ledger, Ttl, now_ms
from allspark_bus.presence import Presence
from allspark_bus.store import Store
from allspark_proto import fleet_pb2 as fleet

from tests.fleet.harness import request

LONG_S = 3600.0  # presence that does not lapse by itself
RID = "default/u"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Link:
    """Takes every message."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, fleet.ToWorker]] = []

    async def send(self, worker_id: str, message: fleet.ToWorker) -> bool:
        self.sent.append((worker_id, message))
        return True

    @property
    def dispatched(self) -> list[tuple[str, str]]:
        return [(w, m.dispatch.request_id) for w, m in self.sent if m.WhichOneof("message") == "dispatch"]


class Broker:
    """What of a broker takes part."""

    def __init__(self, name: str, store: Store) -> None:
        self.clock = Clock()
        self.ledger = Ledger(store, Ttl(), name)
        self.table = WorkerTable(1000.0, self.clock)
        self.link = Link()
        affinity = PrefixAffinity(lambda model: None, self.clock)
        self.dispatcher = Dispatcher(
            self.ledger,
            self.table,
            self.link,  # type: ignore[arg-type]
            lambda: RequestQueue(100),
            affinity,
            lambda _: Work(1),
            self.clock,
        )
        self.presence = Presence(store, name, LONG_S)
        self.orphans = Orphans(
            name, self.ledger, self.dispatcher, self.table, self.presence, self._ask, self.clock
        )
        self.num_asked = 0

    async def _ask(self) -> None:
        self.num_asked += 1

    async def attend(self, seconds_later: float = 0.0) -> None:
        self.clock.now += seconds_later
        await self.orphans.attend(["m"], 5.0)

    async def settled(self) -> "Broker":
        """Has been here long enough to judge."""
        await self.attend()
        await self.attend(TTL_S)
        return self

    def announce(self, worker: str, *held: tuple[str, int]) -> None:
        message = fleet.Announce(
            device="cpu",
            models=[fleet.WorkerModel(name="m", state="running", capacity=8)],
            held=[fleet.HeldRequest(request_id=r, epoch=e, model="m") for r, e in held],
        )
        self.table.announce(worker, message)

    async def admit(self, worker: str = "") -> None:
        body = request("u", [1, 2], 5).SerializeToString()
        entry = Entry(RID, "m", 1 if worker else 0, worker, body, now_ms(), 0, 0, 0, 0)
        assert (await self.ledger.admit(entry, b"d")).outcome == "new"


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
