"""Moves requests to workers and back: assignment, acknowledgement, claims, recovery (R2, R3, R10-R12)."""

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import replace

from allspark_bus import damage, keys
from allspark_bus.errors import Damaged
from allspark_bus.ledger import Advance, Ending, Entry, Ledger, now_ms
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from google.protobuf.message import DecodeError

from allspark_broker.affinity import Prefix, PrefixAffinity
from allspark_broker.forecast import Forecast, Outlook
from allspark_broker.links import WorkerLink
from allspark_broker.quarantine import MAX_DEATHS, SILENT_TIMEOUTS, Quarantine
from allspark_broker.queue import RequestQueue, Waiting
from allspark_broker.waits import Waits
from allspark_broker.work import Work
from allspark_broker.workers import Flight, Worker, WorkerTable

log = logging.getLogger(__name__)

NOT_SENT_S = math.inf  # of a place on a worker that is taken while Redis is told


class Dispatcher:
    """Owns the queues; all methods run on the broker's loop."""

    def __init__(
        self,
        ledger: Ledger,
        table: WorkerTable,
        link: WorkerLink,
        new_queue: Callable[[], RequestQueue],
        affinity: PrefixAffinity,
        work_of: Callable[[pb.StartRequestRequest], Work],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._table = table
        self._link = link
        self._affinity = affinity
        self.work_of = work_of
        self._clock = clock
        self.queues: dict[str, RequestQueue] = defaultdict(new_queue)
        self.waits: dict[str, Waits] = defaultdict(lambda: Waits(clock))
        self.forecasts: dict[str, Forecast] = defaultdict(Forecast)
        self.quarantine = Quarantine(ledger, self._enqueue, table.heard_s, clock)

    def keep(self, models: Container[str]) -> None:
        """Forgets what belongs to other models, except queues that somebody waits in."""
        for name in [n for n, q in self.queues.items() if n not in models and q.is_unused]:
            del self.queues[name]
        for name in [n for n in self.waits if n not in models and n not in self.queues]:
            del self.waits[name]
        for name in [n for n in self.forecasts if n not in models and n not in self.queues]:
            del self.forecasts[name]

    def reserve(self, request: pb.StartRequestRequest, rid: str, work: Work) -> Worker | None:
        """Takes a place for a request about to be recorded: on the best worker, or (None) in the queue.

        `start` or `give_up` must follow.
        """
        model = request.model_name
        queue = self.queues[model]
        # The retry of a request that a worker holds must not take its flight from it when it is given up.
        must_queue = len(queue) or self._table.holding(rid) is not None
        worker = None if must_queue else self._choose(model, self._affinity.prefix(request))
        if worker is None:
            queue.promise(keys.split_request_id(rid)[0])
        else:
            worker.flights[rid] = Flight(rid, model, 0, NOT_SENT_S, work=work)
        return worker

    def outlook(self, model: str, tenant: str, priority: int, work: Work) -> Outlook:
        """When a request would have ended if it came now."""
        ahead = self.queues[model].ahead_of(tenant, priority)
        workers, forecast = self._table.serving(model), self.forecasts[model]
        free = [worker for worker in workers if self._may_begin(worker, model, work)]
        if not ahead.requests and (free or not workers):
            return Outlook(0, forecast.at_once_s(free, model, work))
        ahead = replace(ahead, usual_s=ahead.requests * self.waits[model].interval_s())
        return Outlook(ahead.requests, forecast.end_s(workers, model, work, ahead, self._clock()))

    def _may_begin(self, worker: Worker, model: str, work: Work) -> bool:
        """Whether a worker has rows for a request that nobody else occupies."""
        rows = worker.rows(model) + work.rows
        return worker.free_capacity(model) > 0 and rows <= self.forecasts[model].rows(worker.models[model])

    def give_up(self, worker: Worker | None, model: str, rid: str) -> None:
        """Gives back the place of a request that was not recorded."""
        if worker is None:
            self.queues[model].withdraw(keys.split_request_id(rid)[0])
        else:
            worker.flights.pop(rid, None)

    def _choose(self, model: str, prefix: Prefix) -> Worker | None:
        """The worker for a request that is dispatched at once; None: all are full."""
        worker = self._table.choose(model, prefer=self._affinity.matches(prefix))
        if worker is not None:
            self._affinity.record(prefix, worker.worker_id)
        return worker

    async def start(self, worker: Worker | None, entry: Entry, work: Work) -> None:
        """Sends a request that was just recorded, or queues it. `work` is as `work_of` has it."""
        waiting = Waiting(
            entry.request_id, entry.epoch, entry.priority, entry.created_ms, entry.deadline_ms, entry.body
        )
        waiting.work = work
        queue = self.queues[entry.model]
        if worker is None:
            queue.withdraw(waiting.tenant)
            self._push(entry.model, waiting)
            await self.pump(entry.model)
        else:
            queue.charge(waiting.tenant, work)
            await self._send(worker, entry.model, waiting)

    def _push(self, model: str, waiting: Waiting) -> None:
        queue = self.queues[model]
        if not len(queue):
            self.waits[model].began()
        is_kept = queue.may_keep(len(waiting.body))
        if waiting.work is None or not is_kept:
            waiting.prefix, waiting.work = self._look_into(waiting)
        if not is_kept:
            waiting.body = b""
        queue.push(waiting)

    async def pump(self, model: str) -> None:
        """Dispatches queued requests while some worker has room."""
        queue = self.queues[model]
        while (waiting := queue.peek()) is not None:
            if waiting.is_late(now_ms()):
                await self._expire(model, [waiting])
                continue
            if waiting.prefix is None:
                waiting.prefix, _ = self._look_into(waiting)
            worker = self._choose(model, waiting.prefix)
            if worker is None:
                return
            queue.serve(waiting)
            # The place is taken before the first await, or two pumps would overfill the worker.
            flight = Flight(waiting.request_id, model, waiting.epoch, NOT_SENT_S, work=waiting.work)
            worker.flights[waiting.request_id] = flight
            async with self._ends_damaged(waiting.request_id, worker):
                advance = await self._ledger.advance(waiting.request_id, waiting.epoch, worker.worker_id)
                if advance.outcome != "ok":
                    worker.flights.pop(waiting.request_id, None)
                    continue
                self.waits[model].left()
                waiting.epoch, waiting.resume = advance.epoch, advance.num_tokens > 0
                await self._send(worker, model, waiting)

    def _look_into(self, waiting: Waiting) -> tuple[Prefix, Work]:
        """What the request is routed by, and what its tenant is charged for it."""
        try:
            request = pb.StartRequestRequest.FromString(waiting.body)
        except DecodeError:
            return Prefix(), Work(1)  # it ends when it is sent
        return self._affinity.prefix(request), waiting.work or self.work_of(request)

    @contextlib.asynccontextmanager
    async def _ends_damaged(self, rid: str, worker: Worker | None = None) -> AsyncIterator[None]:
        """A request whose record turns out to be damaged ends; with every error its place is free again."""
        try:
            yield
        except Damaged as error:
            if worker is not None:
                worker.flights.pop(rid, None)
            await self._ledger.condemn(rid, error.reason)
        except BaseException:  # whether it was dispatched is not known: who looks for orphans will find it
            if worker is not None:
                worker.flights.pop(rid, None)
            raise

    async def pump_all(self) -> None:
        """Dispatches what any queue holds."""
        for model in [m for m, q in self.queues.items() if len(q)]:
            await self.pump(model)

    async def _send(self, worker: Worker, model: str, waiting: Waiting) -> None:
        body = waiting.body
        if not body:
            entry = await self._ledger.load(waiting.request_id)
            if entry is None:
                worker.flights.pop(waiting.request_id, None)
                return
            body = entry.body
        flight = worker.flights[waiting.request_id] = self._flight(model, waiting)
        with damage.named(f"request {waiting.request_id}"):
            request = pb.StartRequestRequest.FromString(body)
        flight.is_whole = not waiting.resume
        if waiting.work is not None:
            self.forecasts[model].sent(waiting.work)
        message = fleet.ToWorker(
            dispatch=fleet.Dispatch(
                request_id=waiting.request_id,
                epoch=waiting.epoch,
                resume=waiting.resume,
                deadline_unix_ms=waiting.deadline_ms,
                priority=waiting.priority,
                waited_ms=max(0, now_ms() - waiting.created_ms),
                request=request,
            )
        )
        if not await self._link.send(worker.worker_id, message):
            worker.unreachable += 1
            await self.take_back(worker, flight)

    def _flight(self, model: str, w: Waiting) -> Flight:
        return Flight(w.request_id, model, w.epoch, self._clock(), is_ours=True, work=w.work)

    async def take_back(self, worker: Worker, flight: Flight, *, doubt_s: float | None = None) -> bool:
        """Claims a request from a worker that does not run it (any more) and queues it again; see `claim`."""
        worker.flights.pop(flight.request_id, None)
        return await self.claim(flight.request_id, flight.epoch, doubt_s=doubt_s, was_served=True)

    async def claim(
        self, rid: str, epoch: int, *, doubt_s: float | None = None, was_served: bool = False
    ) -> bool:
        """Fences whoever held the request and queues it, unless its workers died with it too often.

        `doubt_s`: its worker counts as dead, and if it is one too many, so long is waited for a sign that one
        of them lives. `was_served`: a worker had it, so it goes before those that still wait for their first
        turn. False: it has ended, or somebody else was faster.
        """
        is_claimed = False
        async with self._ends_damaged(rid):
            is_claimed = await self._claim(rid, epoch, doubt_s, was_served)
        return is_claimed

    async def _claim(self, rid: str, epoch: int, doubt_s: float | None, was_served: bool) -> bool:
        advance = await self._ledger.advance(rid, epoch, "", died=doubt_s is not None)
        if advance.outcome != "ok":
            return False
        if advance.deaths >= MAX_DEATHS:
            # Counted here, or by a broker that died before it decided: then nobody knows how it was lost.
            silence_s = SILENT_TIMEOUTS * self._table.timeout_s
            self.quarantine.hold(rid, advance, was_served, silence_s if doubt_s is None else doubt_s)
        else:
            await self._enqueue(rid, advance, was_served)
        return True

    async def _enqueue(self, rid: str, advance: Advance, was_served: bool) -> None:
        entry = await self._ledger.load(rid)
        if entry is None:
            return
        waiting = Waiting(
            rid,
            advance.epoch,
            entry.priority,
            entry.created_ms,
            entry.deadline_ms,
            entry.body,
            resume=advance.num_tokens > 0,
            was_served=was_served or advance.num_tokens > 0,
        )
        self._push(entry.model, waiting)
        await self.pump(entry.model)

    async def bury(self, worker: Worker, doubt_s: float | None, brokers: Container[str] = ()) -> None:
        """Settles what a lost worker held, one claim at a time. `doubt_s`: see `claim`; None: it left.

        What one of the other live `brokers` answers for is left to it: it may well hear the worker.
        """
        flights = list(worker.flights.values())
        others = [f for f in flights if not f.is_ours]
        # Not only what was accepted: the request may have killed it before its answer left.
        for flight in [f for f in flights if f.is_ours]:
            await self.take_back(worker, flight, doubt_s=doubt_s)
        if others:
            answering = await self._ledger.losses.answering([f.request_id for f in others])
            for flight, broker in zip(others, answering, strict=True):
                if broker not in brokers:
                    await self.take_back(worker, flight, doubt_s=doubt_s)

    async def rescue(self, worker: Worker) -> None:
        """Moves what a worker holds that cannot append any more; it is told, and fenced in any case."""
        log.warning(
            "worker %s has not reached Redis for %.1f s; %d request(s) move on",
            worker.worker_id, worker.store_silent_s, len(worker.flights),
        )  # fmt: skip
        for flight in list(worker.flights.values()):
            if await self.take_back(worker, flight):
                cancel = fleet.Cancel(request_id=flight.request_id)
                await self._link.send(worker.worker_id, fleet.ToWorker(cancel=cancel))

    async def cancel(self, rid: str, model: str, worker_id: str) -> None:
        """Frees what an ended request holds: its place in a queue, or its slot in a worker."""
        self.queues[model].remove(rid)
        holder = self._table.holding(rid)
        name = holder[0].worker_id if holder else worker_id
        if holder:
            holder[1].is_whole = False
        if name:
            await self._link.send(name, fleet.ToWorker(cancel=fleet.Cancel(request_id=rid)))

    async def ended(self, worker: Worker, rid: str, epoch: int, num_tokens: int) -> None:
        """A worker let go of a request, which finished with so many tokens if not 0: its place is free."""
        flight = worker.flights.get(rid)
        if flight is not None and flight.epoch == epoch:
            del worker.flights[rid]
            if num_tokens and flight.is_whole and flight.work is not None:
                self.forecasts[flight.model].finished(flight.work, num_tokens)
            await self.pump(flight.model)

    async def expire_deadlines(self) -> None:
        """Ends queued requests whose deadline has passed; running ones are ended by their engine."""
        for model, queue in list(self.queues.items()):
            if late := queue.expired(now_ms()):
                await self._expire(model, late)

    async def _expire(self, model: str, late: Sequence[Waiting]) -> None:
        """Ends them together: one after another would keep the last waiting for all round trips."""
        ending = Ending(pb.GenerateInterrupted, "deadline", "its deadline passed while it was queued")
        rids = [w.request_id for w in late if self.queues[model].remove(w.request_id)]
        outcomes = await asyncio.gather(
            *[self._ledger.finish(rid, ending) for rid in rids], return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome  # the request is still open and queued nowhere: `Orphans` finds it
