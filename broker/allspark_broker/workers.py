"""The live worker table: who serves what, who holds which request, who is dead. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from allspark_proto import fleet_pb2 as fleet

from allspark_broker.work import Work

#: Heartbeats in a row that could not be handed to a worker's connection before it counts as dead: a killed
#: process closes its socket, and that is known long before its silence is.
MAX_UNREACHABLE = 2
#: A worker that Redis has owed an answer for so long gets no requests: they would wait there.
STORE_DOUBT_S = 2.0
#: What it holds goes to others after this; a claim is one round trip, and what it computed meanwhile is lost.
RESCUE_S = 3.0
#: Affinity may load a worker up to this multiple of the mean: consistent hashing with bounded loads
#: (Mirrokni, Thorup and Zadimoghaddam, 2016, arXiv 1608.01350).
LOAD_FACTOR = 1.25


@dataclass(slots=True)
class Flight:
    """A request that a worker holds. `accepted`: it said so (only then can it have run).

    `work`: what it may be, if this broker sent it. `is_told`: the worker's last figures include it.
    `is_whole`: it began here, and nobody ended it, so what it generates tells what requests use.
    `is_ours`: this broker sent it there.
    """

    request_id: str
    model: str
    epoch: int
    sent_s: float
    accepted: bool = False
    work: Work | None = None
    is_told: bool = False
    is_whole: bool = False
    is_ours: bool = False


@dataclass(slots=True)
class Worker:
    """One worker process, by its own id, which is also its socket identity.

    `is_mute`: it left a dispatch unacknowledged and has accepted none and not announced itself since.
    `told_s`: when its last figures came.
    """

    worker_id: str
    device: str
    last_seen_s: float
    draining: bool = False
    unreachable: int = 0
    is_mute: bool = False
    seconds_since_step: float = 0.0
    store_silent_s: float = 0.0
    told_s: float = 0.0
    models: dict[str, fleet.WorkerModel] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)

    @property
    def is_disconnected(self) -> bool:
        """Whether its connection is gone, so that nothing can be handed to it."""
        return self.unreachable >= MAX_UNREACHABLE

    def load(self, model: str) -> int:
        """Requests of a model that it holds."""
        return sum(1 for f in self.flights.values() if f.model == model)

    def rows(self, model: str) -> int:
        """Sequences of the requests of a model that it holds."""
        flights = [f for f in self.flights.values() if f.model == model]
        return sum(1 if f.work is None else f.work.rows for f in flights)

    def has_free_row(self, model: str) -> bool:
        """Whether its batch is not full."""
        return self.rows(model) < self.models[model].facts.max_batch

    def free_capacity(self, model: str) -> int:
        """Requests of a model that it would take now; 0 unless it runs the model and can be reached."""
        state = self.models.get(model)
        # What could not be handed to it a moment ago would come straight back: until it speaks, others first.
        if state is None or state.state != "running" or self.draining or self.unreachable:
            return 0
        if self.store_silent_s >= STORE_DOUBT_S:
            return 0
        return max(0, int(state.capacity) - self.load(model))


class WorkerTable:
    """All workers this broker knows."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def heard_s(self, worker_id: str) -> float | None:
        """When a worker was heard last; None if it is not known."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.last_seen_s

    def announce(self, worker_id: str, message: fleet.Announce) -> tuple[Worker, list[Flight]]:
        """Adds or renews a worker. Returns it and the flights that it turned out not to hold (any more)."""
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = Worker(worker_id, message.device, self._clock())
        self.seen(worker)
        worker.device = message.device
        worker.draining = message.draining
        worker.is_mute = False
        worker.models = {m.name: m for m in message.models}
        held = {(h.request_id, h.epoch) for h in message.held}
        lost = [f for f in worker.flights.values() if f.accepted and (f.request_id, f.epoch) not in held]
        for flight in lost:
            del worker.flights[flight.request_id]
        for h in message.held:
            if h.request_id not in worker.flights:
                flight = Flight(h.request_id, h.model, h.epoch, self._clock(), accepted=True)
                worker.flights[h.request_id] = flight
        self._was_told(worker)
        return worker, lost

    def heartbeat(self, worker: Worker, message: fleet.WorkerHeartbeat) -> None:
        """Takes over what a worker says about itself."""
        self.seen(worker)
        worker.draining = message.draining
        worker.seconds_since_step = message.seconds_since_step
        worker.store_silent_s = message.store_silent_s
        worker.models = {m.name: m for m in message.models}
        self._was_told(worker)

    def _was_told(self, worker: Worker) -> None:
        """A worker's figures came; they include what it said it had accepted."""
        worker.told_s = self._clock()
        for flight in worker.flights.values():
            flight.is_told = flight.accepted

    def accepted(self, worker: Worker, message: fleet.Accepted) -> None:
        """A worker took a request, from this broker or from another one."""
        flight = worker.flights.get(message.request_id)
        if flight is None and not message.model:
            return  # of a worker that says too little: its next announcement tells
        if flight is None or flight.epoch < message.epoch:
            flight = Flight(message.request_id, message.model, message.epoch, self._clock())
            worker.flights[message.request_id] = flight
        elif flight.epoch > message.epoch:
            return
        flight.accepted = True
        worker.is_mute = False

    def without_store(self) -> list[Worker]:
        """Workers with requests that Redis has been silent to for too long, while others can serve them."""
        # No sooner than it is passed over for new requests.
        limit_s = max(min(self.timeout_s, RESCUE_S), STORE_DOUBT_S)
        cut_off = [w for w in self if w.flights and w.store_silent_s >= limit_s]
        healthy = [w for w in self if w.store_silent_s < STORE_DOUBT_S and not w.draining]
        served = {name for w in healthy for name, state in w.models.items() if state.state == "running"}
        return [w for w in cut_off if any(f.model in served for f in w.flights.values())]

    def seen(self, worker: Worker) -> None:
        """Any message counts as a sign of life."""
        worker.last_seen_s = self._clock()
        worker.unreachable = 0

    def excuse(self, seconds: float) -> None:
        """This process did not run for so long: who could not be heard meanwhile was not silent."""
        for worker in self._workers.values():
            worker.last_seen_s += seconds
            worker.told_s += seconds
            for flight in worker.flights.values():
                flight.sent_s += seconds

    def remove(self, worker_id: str) -> Worker | None:
        """Forgets a worker; its flights are the caller's to settle."""
        return self._workers.pop(worker_id, None)

    def dead(self) -> list[Worker]:
        """Workers that have been silent too long, busy or idle, or whose connection is gone."""
        limit = self._clock() - self.timeout_s
        return [w for w in self if w.last_seen_s < limit or w.is_disconnected]

    def choose(
        self, model: str, excluding: Iterable[str] = (), prefer: Mapping[str, int] | None = None
    ) -> Worker | None:
        """The preferred worker with room for a request of this model, else the least loaded; ties by id.

        `prefer`: how much of the request a worker has computed before; the most wins among those whose load
        stays within `LOAD_FACTOR` of the mean.
        """
        excluded = set(excluding)
        candidates = [w for w in self if w.worker_id not in excluded and w.free_capacity(model) > 0]
        # What a mute worker swallowed would come back to it for ever: having lost it, it has the least load.
        candidates = [w for w in candidates if not w.is_mute] or candidates
        # Elsewhere it would wait for a row of the batch, which costs more than its prefix.
        candidates = [w for w in candidates if w.has_free_row(model)] or candidates
        if prefer and (near := _within_load(candidates, model)):
            candidates = near
        gain = prefer or {}
        return min(
            candidates,
            key=lambda w: (-gain.get(w.worker_id, 0), w.load(model), len(w.flights), w.worker_id),
            default=None,
        )

    def serving(self, model: str) -> list[Worker]:
        """Workers that run a model and are not leaving."""
        running = [w for w in self if (state := w.models.get(model)) and state.state == "running"]
        return [w for w in running if not w.draining]

    def holding(self, rid: str) -> tuple[Worker, Flight] | None:
        """Who holds a request."""
        for worker in self._workers.values():
            if (flight := worker.flights.get(rid)) is not None:
                return worker, flight
        return None

    def unacknowledged(self, older_than_s: float) -> list[tuple[Worker, Flight]]:
        """Dispatches that no Accepted followed in time."""
        limit = self._clock() - older_than_s
        return [(w, f) for w in self for f in w.flights.values() if not f.accepted and f.sent_s < limit]

    def eligible(self, is_eligible: Callable[[str], bool]) -> list[Worker]:
        """Workers whose device passes and that are not leaving."""
        return [w for w in self if not w.draining and is_eligible(w.device)]

    def num_flights(self) -> int:
        """Requests held by workers."""
        return sum(len(w.flights) for w in self)


def _within_load(workers: list[Worker], model: str) -> list[Worker]:
    """Those that may take one more request without exceeding their share of the load."""
    if not workers:
        return []
    loads = {w.worker_id: w.load(model) for w in workers}
    bound = math.ceil(LOAD_FACTOR * (sum(loads.values()) + 1) / len(workers))
    return [w for w in workers if loads[w.worker_id] < bound]
