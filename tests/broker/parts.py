"""What of a broker decides where requests go, without its sockets: real Valkey, own clock."""

from allspark_broker.affinity import PrefixAffinity
from allspark_broker.dispatcher import Dispatcher
from allspark_broker.orphans import TTL_S, Orphans
from allspark_broker.queue import RequestQueue
from allspark_broker.work import Work
from allspark_broker.workers import WorkerTable
from allspark_bus.ledger import Entry, Ledger, Ttl, now_ms
from allspark_bus.presence import Presence
from allspark_bus.store import Store
from allspark_proto import fleet_pb2 as fleet

from tests.fleet.harness import request

LONG_S = 3600.0  # presence that does not lapse by itself
TIMEOUT_S = 1000.0  # silence after which a worker counts as dead
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
        self.table = WorkerTable(TIMEOUT_S, self.clock)
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

    async def admit(self, worker: str = "", deadline_ms: int = 0) -> None:
        body = request("u", [1, 2], 5).SerializeToString()
        entry = Entry(RID, "m", 1 if worker else 0, worker, body, now_ms(), deadline_ms, 0, 0, 0)
        assert (await self.ledger.admit(entry, b"d")).outcome == "new"
