"""The broker process: two sockets, one loop, periodic duties."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
import uuid as uuid_lib
from collections.abc import Awaitable, Callable

import uvloop
import zmq.asyncio
from allspark_bus import sockets, vitals
from allspark_bus.catalogue import Catalogue
from allspark_bus.errors import FleetError, MalformedMessage, StoreUnavailable
from allspark_bus.ledger import Ttl
from allspark_bus.presence import Presence
from allspark_bus.settings import ConfigError
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from google.protobuf.message import DecodeError
from redis.exceptions import RedisError

from allspark_broker.access import BACKEND, FRONTEND, Access
from allspark_broker.affinity import PrefixAffinity
from allspark_broker.aside import Aside
from allspark_broker.calls import Calls, Controls
from allspark_broker.dispatcher import Dispatcher
from allspark_broker.fleet_view import EngineStats
from allspark_broker.frontend import PROGRESS_S, Frontend
from allspark_broker.lifecycle import Lifecycle
from allspark_broker.limits import LimitedLedger, Limits
from allspark_broker.links import WorkerLink
from allspark_broker.orphans import ATTEND_S, TTL_S, Orphans
from allspark_broker.quarantine import CLOSED_S, SILENT_TIMEOUTS
from allspark_broker.queue import RequestQueue
from allspark_broker.requests import Requests
from allspark_broker.settings import BrokerSettings
from allspark_broker.takeover import Takeover
from allspark_broker.tenants import TenantFileError, Tenants
from allspark_broker.texts import Texts
from allspark_broker.work import Work, work_of
from allspark_broker.worker_checks import WorkerChecks
from allspark_broker.workers import STORE_DOUBT_S, WorkerTable

log = logging.getLogger(__name__)

GOODBYE = "said goodbye"
GOODBYE_S = 1.0
FINISH_S = 2.0
STORE_PATIENCE_S = 5.0  # less than a gateway waits, so that its caller learns what is wrong
REAP_S = 0.25
REFRESH_S = 1.0
SWEEP_S = 60.0  # or the time to live of results, if that is shorter: indices outlive them by no more
STALL_S = 1.0  # a duty that comes so late says that this process did not run


class Broker:
    """Wires the parts; `run` serves until `stop`."""

    _indexed: frozenset[str] = frozenset()  # models that have, or had lately, open requests

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self.broker_id = uuid_lib.uuid4().hex[:12]
        self._context = zmq.asyncio.Context()
        self._access = Access(settings, self._context)
        client_socket, self.frontend = self._bind(settings.frontend, FRONTEND)
        self._backend, self.backend = self._bind(settings.backend, BACKEND)
        self._link = WorkerLink(self._backend, self.broker_id)
        self._store = Store(settings.redis, patience_s=STORE_PATIENCE_S)
        self._tenants = _read_tenants(settings)
        self._ledger = LimitedLedger(self._store, _ttl(settings), self.broker_id, self._tenants)
        self._limits = Limits(self._ledger, self._work_of)
        self._table = WorkerTable(settings.worker_timeout_s, time.monotonic)
        affinity = PrefixAffinity(lambda model: self._lifecycle.models.get(model), time.monotonic)
        self._dispatcher = Dispatcher(
            self._ledger, self._table, self._link, self._new_queue, affinity, self._work_of
        )
        self._lifecycle = Lifecycle(
            Catalogue(self._store),
            self._ledger,
            self._table,
            self._nudge,
            self._dispatcher.cancel,
            settings.drain_s,
        )
        self._takeover = Takeover(self._lifecycle, self._dispatcher, settings.drain_s)
        self._controls = Controls(self._link.send)
        self._requests = Requests(
            self._ledger,
            self._dispatcher,
            self._lifecycle,
            WorkerChecks(self._table, self._controls.call),
            Texts(self._table, self._controls.call),
            self._limits,
            settings.max_uuid_bytes,
        )
        self._stats = EngineStats()
        calls = Calls(
            self._requests,
            self._lifecycle,
            self._dispatcher,
            self._table,
            self._stats,
            self._controls.call,
            self._drain_fleet,
        )
        presence = Presence(self._store, self.broker_id, TTL_S)
        self._aside = Aside(self._table, presence)
        calls.check = self._aside.check
        self._frontend = Frontend(client_socket, self._access, calls.execute, self._is_without_store)
        self._tasks: set[asyncio.Task[None]] = set()
        self._orphans = Orphans(
            self.broker_id,
            self._ledger,
            self._dispatcher,
            self._table,
            presence,
            self._ask_workers,
        )
        self._awake_s = time.monotonic()
        self._stopped = asyncio.Event()

    def _bind(self, endpoint: str, door: str) -> tuple[zmq.asyncio.Socket, str]:
        return sockets.router(
            self._context,
            endpoint,
            max_message_bytes=int(self._settings.max_message_bytes),
            keys=self._access.keys,
            door=door,
            # Clients do not trust each other: with keys none may take over the answers of another.
            is_handed_over=door == BACKEND or self._access.keys is None,
        )

    def _is_without_store(self) -> bool:
        return self._store.silent_s() >= STORE_DOUBT_S

    def _new_queue(self) -> RequestQueue:
        return RequestQueue(self._settings.max_queue, self._tenants.weight)

    def _work_of(self, request: pb.StartRequestRequest) -> Work:
        record = self._lifecycle.models.get(request.model_name)
        return work_of(request, record.model_facts().max_length if record is not None else 0)

    async def run(self) -> None:
        """Serves until `stop`. The first catalogue read must succeed, so that no known model is denied."""
        await self._until_store_answers()
        loops = [
            self._frontend.serve(),
            self._serve_backend(),
            self._every(self._settings.heartbeat_s, self._beat),
            self._every(PROGRESS_S, self._frontend.show_progress),
            self._every(REAP_S, self._reap),
            self._every(REFRESH_S, self._refresh),
            self._every(ATTEND_S, self._attend),
            self._every(min(SWEEP_S, self._settings.result_ttl_s), self._sweep),
        ]
        running = [asyncio.ensure_future(loop) for loop in loops]
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            done, _ = await asyncio.wait([*running, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._frontend.finish(min(self._settings.drain_s, FINISH_S))
        finally:
            await self._frontend.finish(0)
            tasks = [*running, stopped, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._say_goodbye()
            self._takeover.close()
            self._access.close()
            await self._store.close()
            self._context.destroy(linger=sockets.LINGER_MS)

    def stop(self) -> None:
        """Ends `run` after the calls in progress, or the drain limit. Requests stay in the ledger."""
        self._stopped.set()

    async def _until_store_answers(self) -> None:
        while True:
            try:
                await self._lifecycle.refresh()
                return
            except StoreUnavailable as e:
                log.warning("waiting for Redis: %s", e)

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(FleetError, TimeoutError):
            await asyncio.wait_for(self._orphans.leave(), GOODBYE_S)  # else others notice its silence

    async def _every(self, interval_s: float, duty: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await duty()
            except (FleetError, RedisError) as e:
                log.warning("%s: %s", getattr(duty, "__name__", duty), e)
                self._orphans.hurry()  # a claim may have been cut off

    # ---- workers ----------------------------------------------------------------------------------

    async def _serve_backend(self) -> None:
        while True:
            (identity, *body), _ = await self._access.receive(self._backend, BACKEND)
            try:
                message = fleet.FromWorker.FromString(sockets.payload_of(body))
            except (MalformedMessage, DecodeError) as e:
                log.warning("malformed message from worker %r: %s", identity, e)
                continue
            self._spawn(self._on_worker(message))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except FleetError as e:
            log.warning("a worker's message could not be handled: %s", e.reason)
            self._orphans.hurry()
        except Exception:
            log.exception("a worker's message could not be handled")

    async def _on_worker(self, message: fleet.FromWorker) -> None:
        kind = message.WhichOneof("message")
        if kind == "announce":
            await self._on_announce(message.worker_id, message.announce)
            return
        worker = self._table.get(message.worker_id)
        if worker is None:
            await self._link.send(message.worker_id, fleet.ToWorker(reannounce=fleet.Reannounce()))
            return
        self._table.seen(worker)
        if kind == "heartbeat":
            self._table.heartbeat(worker, message.heartbeat)
            await self._lifecycle.workers.notify()
            await self._dispatcher.pump_all()
        elif kind == "accepted":
            self._table.accepted(worker, message.accepted)
        elif kind == "refused":
            await self._on_refused(message.worker_id, message.refused)
        elif kind == "ended":
            ended = message.ended
            await self._dispatcher.ended(worker, ended.request_id, ended.epoch, ended.num_tokens)
            await self._ledger.settle(ended.request_id)
        elif kind == "control_reply":
            self._controls.answer(message.control_reply)
        elif kind == "goodbye":
            await self._bury(message.worker_id, GOODBYE, None)

    async def _on_announce(self, worker_id: str, announce: fleet.Announce) -> None:
        is_new = self._table.get(worker_id) is None
        _, lost = self._table.announce(worker_id, announce)
        if is_new:
            log.info("worker %s on %s announced itself", worker_id, announce.device)
        for flight in lost:
            await self._dispatcher.claim(flight.request_id, flight.epoch, was_served=True)
        await self._lifecycle.workers.notify()
        await self._dispatcher.pump_all()

    async def _on_refused(self, worker_id: str, refused: fleet.Refused) -> None:
        worker = self._table.get(worker_id)
        flight = worker.flights.get(refused.request_id) if worker else None
        if worker is None or flight is None or flight.epoch != refused.epoch:
            return
        log.info("worker %s hands back %s: %s", worker_id, refused.request_id, refused.reason)
        await self._dispatcher.take_back(worker, flight)

    async def _bury(self, worker_id: str, why: str, doubt_s: float | None) -> None:
        """`doubt_s`: how long a death of it is doubted where it is decisive; None: it is none."""
        worker = self._table.remove(worker_id)
        if worker is not None:
            is_routine = why == GOODBYE and not worker.flights
            level = logging.INFO if is_routine else logging.WARNING
            log.log(level, "worker %s %s; it held %d request(s)", worker_id, why, len(worker.flights))
            self._stats.retire(worker)
            await self._dispatcher.bury(worker, doubt_s, self._orphans.others)
            await self._lifecycle.workers.notify()

    async def _bury_dead(self) -> None:
        for worker in self._table.dead():
            if worker.is_disconnected:
                await self._bury(worker.worker_id, "is not connected any more", CLOSED_S)
            else:
                doubt_s = SILENT_TIMEOUTS * self._settings.worker_timeout_s
                await self._bury(worker.worker_id, "has fallen silent", doubt_s)

    async def _nudge(self) -> None:
        for worker in self._table:
            await self._link.send(worker.worker_id, fleet.ToWorker(reconcile=fleet.Reconcile()))

    async def _ask_workers(self) -> None:
        for worker in self._table:
            await self._link.send(worker.worker_id, fleet.ToWorker(reannounce=fleet.Reannounce()))

    async def _drain_fleet(self) -> None:
        for worker in self._table:
            await self._link.send(worker.worker_id, fleet.ToWorker(drain=fleet.Drain()))
        self.stop()

    # ---- periodic duties --------------------------------------------------------------------------

    def _notice_stall(self) -> None:
        """A broker that was stopped for a while must not take its own silence for that of its workers."""
        now = time.monotonic()
        gap_s, self._awake_s = now - self._awake_s, now
        if gap_s > max(STALL_S, 2 * self._settings.heartbeat_s):
            log.warning("this broker did not run for %.1f s", gap_s)
            self._table.excuse(gap_s)

    async def _beat(self) -> None:
        self._notice_stall()
        for worker in self._table:
            beat = fleet.ToWorker(heartbeat=fleet.BrokerHeartbeat())
            if not await self._link.send(worker.worker_id, beat):
                worker.unreachable += 1
        await self._bury_dead()

    async def _reap(self) -> None:
        self._notice_stall()
        await self._bury_dead()
        for worker in () if self._is_without_store() else self._table.without_store():
            await self._dispatcher.rescue(worker)
        for worker, flight in self._table.unacknowledged(self._settings.ack_timeout_s):
            log.warning("worker %s did not acknowledge %s", worker.worker_id, flight.request_id)
            worker.is_mute = True
            await self._dispatcher.take_back(worker, flight)
        await self._dispatcher.expire_deadlines()
        await self._dispatcher.quarantine.look()

    async def _refresh(self) -> None:
        await self._lifecycle.refresh()
        await self._takeover.look()
        await self._limits.keep_up()
        self._dispatcher.keep(self._lifecycle.models)
        self._stats.keep(self._lifecycle.models)

    async def _attend(self) -> None:
        if await self._aside.holds():
            return
        models = self._lifecycle.models.keys() | self._indexed
        await self._orphans.attend(sorted(models), self._settings.worker_timeout_s)

    async def _sweep(self) -> None:
        self._indexed = await self._ledger.indexed_models()
        await self._ledger.sweep_tenants()
        await self._limits.restore_all()


def _ttl(settings: BrokerSettings) -> Ttl:
    return Ttl(int(settings.result_ttl_s * 1000), int(settings.tombstone_ttl_s * 1000))


def _read_tenants(settings: BrokerSettings) -> Tenants:
    try:
        return Tenants(settings.tenants)
    except TenantFileError as e:
        raise ConfigError(str(e)) from e


async def serve(settings: BrokerSettings) -> None:
    """Runs a broker until SIGTERM or SIGINT."""
    broker = Broker(settings)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, broker.stop)
    vitals.listen(loop)
    log.info("broker %s: clients at %s, workers at %s", broker.broker_id, broker.frontend, broker.backend)
    if settings.ready_fd is not None:
        line = json.dumps({"frontend": broker.frontend, "backend": broker.backend})
        with contextlib.suppress(BrokenPipeError):
            os.write(settings.ready_fd, line.encode() + b"\n")
    await broker.run()


def main(settings: BrokerSettings) -> int:
    """Entry point of `allspark broker`."""
    uvloop.run(serve(settings))
    return 0
