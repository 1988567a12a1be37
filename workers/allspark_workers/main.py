"""The worker process: one loop for messages and publishing, one thread per running engine."""

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
import uuid as uuid_lib
from collections.abc import Coroutine

import uvloop
from allspark_bus import vitals
from allspark_bus.catalogue import Catalogue
from allspark_bus.errors import Denied, FleetError, ParamError
from allspark_bus.ledger import Ledger
from allspark_bus.response_format import document_of
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto.version import VERSION

from allspark_workers.broker_link import BrokerLinks, Link
from allspark_workers.engine.errors import EngineError
from allspark_workers.engine.threads import SWITCH_INTERVAL_S, set_environment
from allspark_workers.engine.types import StepOutput
from allspark_workers.file_info import file_information
from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.guides import Guides
from allspark_workers.hosted import HostedModel
from allspark_workers.ports import EnginePort, LoadEngine
from allspark_workers.publisher import Publication, Publisher
from allspark_workers.reconcile import Reconciler, status_of
from allspark_workers.requests import Requests
from allspark_workers.settings import WorkerSettings
from allspark_workers.texts import Texts
from allspark_workers.watchdog import LOOK_S, Watchdog

log = logging.getLogger(__name__)

EXIT_STALLED, EXIT_CRASHED = 70, 71


class Worker:
    """Wires the parts; `run` serves until it has drained."""

    def __init__(self, settings: WorkerSettings, load: LoadEngine) -> None:
        self._settings = settings
        name = settings.name or f"{socket.gethostname()}-{os.getpid()}"
        self.worker_id = f"{name}-{uuid_lib.uuid4().hex[:8]}"
        self._store = Store(settings.redis, patience_s=None)
        self._ledger = Ledger(self._store)
        self._publisher = Publisher(
            self._ledger, settings.publish_buffer, settings.publish_interval_s, self._on_end
        )
        self._links = BrokerLinks(
            self.worker_id,
            settings,
            self._announce,
            self._heartbeat,
            self._on_message,
            self._publisher.doubt,
        )
        self._reconciler = Reconciler(
            Catalogue(self._store), settings, load, self._host, self._on_stopped, self._links.state_changed
        )
        self._texts = Texts()
        self._guides = Guides(int(settings.max_grammar_bytes), settings.grammar_cpu_s)
        self._requests = Requests(
            self._ledger,
            self._publisher,
            self._reconciler.running,
            self._guides,
            self._texts,
            settings.max_queue,
        )
        self._loop = asyncio.get_running_loop()
        self._drain = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def _host(self, name: str, engine: EnginePort) -> HostedModel:
        engine.profile_enabled = self._settings.profile
        return HostedModel(name, engine, self._emit, self._on_crash)

    def _emit(self, _: str, outputs: list[StepOutput]) -> None:
        self._loop.call_soon_threadsafe(self._publisher.add, outputs)

    def _on_crash(self, name: str, error: BaseException) -> None:
        # Nothing in this process can be trusted to go on; the broker moves its requests.
        log.critical("model %r crashed (%r); this worker exits", name, error)
        os._exit(EXIT_CRASHED)

    def _on_stopped(self, hosted: HostedModel) -> None:
        self._spawn(self._requests.engine_stopped(hosted.engine, self._links.send_all))

    def _on_end(self, p: Publication) -> None:
        is_finished = p.ending is not None and p.ending.status == pb.GenerateFinished
        tokens = len(p.tokens) if is_finished and not p.is_cancelled else 0
        ended = fleet.Ended(request_id=p.request_id, epoch=p.epoch, num_tokens=tokens)
        self._spawn(self._links.send_all(ended=ended))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- messages ---------------------------------------------------------------------------------

    def _announce(self) -> fleet.Announce:
        return fleet.Announce(
            device=self._settings.device,
            models=self._reconciler.describe(),
            held=self._requests.held(),
            draining=self._requests.is_draining,
            version=VERSION,
        )

    def _heartbeat(self) -> fleet.WorkerHeartbeat:
        return fleet.WorkerHeartbeat(
            models=self._reconciler.describe(),
            draining=self._requests.is_draining,
            seconds_since_step=self._seconds_since_step(),
            inflight_requests=len(self._publisher),
            store_silent_s=self._store.silent_s(),
        )

    def _seconds_since_step(self) -> float:
        return max((h.seconds_since_step() for h in self._reconciler.hosted()), default=0.0)

    async def _on_message(self, link: Link, message: fleet.ToWorker) -> None:
        kind = message.WhichOneof("message")
        if kind == "dispatch":
            send = functools.partial(self._links.send, link)
            self._spawn(self._requests.dispatch(message.dispatch, send, self._links.send_all))
        elif kind == "cancel":
            self._requests.cancel(message.cancel.request_id)
        elif kind == "reconcile":
            self._reconciler.nudge()
        elif kind == "control":
            self._spawn(self._on_control(link, message.control))
        elif kind == "drain":
            self._drain.set()

    async def _on_control(self, link: Link, call: fleet.ControlCall) -> None:
        reply = fleet.ControlReply(correlation_id=call.correlation_id)
        try:
            kind = call.WhichOneof("call")
            if kind == "get_engine_stat":
                name = call.get_engine_stat.model_name
                reply.engine_stat.CopyFrom(self._reconciler.stat(name))
            elif kind == "get_op_profiling_info":
                text = self._profile(call.get_op_profiling_info.model_name)
                reply.op_profiling_info.op_profiling_info = text
            elif kind == "tokenize":
                reply.tokens.CopyFrom(await self._tokenize(call.tokenize))
            elif kind == "check_adapter":
                await self._check_adapter(call.check_adapter)
            elif kind == "check_document":
                await self._check_document(call.check_document)
            else:
                info = await asyncio.to_thread(
                    file_information, call.get_file_information, self._settings.model_root
                )
                reply.file_information.CopyFrom(info)
        except FleetError as e:
            reply.as_status, reply.reason = e.status, e.reason
            reply.file_information.current_version_engine = VERSION
        except EngineError as e:
            reply.as_status, reply.reason = status_of(e), str(e)
        except Exception as e:
            log.exception("control call %s failed", call.WhichOneof("call"))
            reply.as_status, reply.reason = pb.ALLSPARK_UNKNOWN_ERROR, f"internal error: {e!r}"
        await self._links.send(link, control_reply=reply)

    def _profile(self, name: str) -> str:
        if not self._settings.profile:
            return ""
        return "".join(h.engine.profile() for h in self._reconciler.hosted() if h.name == name)

    async def _tokenize(self, call: fleet.Tokenize) -> fleet.Tokens:
        hosted = self._reconciler.running(call.model_name)
        if hosted is None:
            raise Denied(f"model {call.model_name!r} is not running on this worker", retry_after_ms=1000)
        return await self._texts.tokenize(call, hosted.engine.facts)

    async def _check_adapter(self, call: fleet.CheckAdapter) -> None:
        hosted = self._reconciler.running(call.model_name)
        if hosted is not None:
            await asyncio.to_thread(hosted.engine.check_adapter, call.lora_name)

    async def _check_document(self, call: fleet.CheckDocument) -> None:
        try:
            await self._guides.check(document_of(call.kind, call.text))
        except GuideError as e:
            raise ParamError(f"response_format: {e}") from e

    # ---- life -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begins to drain."""
        self._drain.set()

    async def run(self) -> None:
        """Serves; after `stop` hands back what has not begun, finishes the rest within the limit, leaves."""
        duties = [
            self._publisher.run(),
            self._publisher.run_checks(),
            self._reconciler.run(),
            self._links.run(),
            self._watch(),
        ]
        running = [asyncio.ensure_future(d) for d in duties]
        drain = asyncio.ensure_future(self._drain.wait())
        try:
            done, _ = await asyncio.wait([*running, drain], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._leave()
        finally:
            for task in [*running, drain, *self._tasks]:
                task.cancel()
            await asyncio.gather(*running, drain, *self._tasks, return_exceptions=True)
            self._links.close()
            await self._guides.close()
            await self._texts.close()
            await self._store.close()

    async def _leave(self) -> None:
        log.info("draining: %d request(s) here", len(self._publisher))
        self._requests.is_draining = True
        self._links.state_changed()
        await self._requests.hand_back(self._links.send_all, begun=False, reason="the worker is draining")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._publisher.empty.wait(), self._settings.drain_s)
        await self._requests.hand_back(self._links.send_all, begun=True, reason="the drain limit has passed")
        await self._links.send_all(goodbye=fleet.Goodbye())

    async def _watch(self) -> None:
        watchdog = Watchdog(self._reconciler.hosted, self._publisher.publications, self._settings.stall_s)
        while True:
            await asyncio.sleep(LOOK_S)
            if verdict := watchdog.verdict():
                log.critical("%s; this worker exits", verdict)
                os._exit(EXIT_STALLED)


async def serve(settings: WorkerSettings, load: LoadEngine) -> None:
    """Runs a worker until SIGTERM or SIGINT."""
    worker = Worker(settings, load)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, worker.stop)
    vitals.listen(loop)
    log.info("worker %s on %s", worker.worker_id, settings.device)
    if settings.ready_fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(settings.ready_fd, json.dumps({"worker": worker.worker_id}).encode() + b"\n")
    await worker.run()


def _real_engine(settings: WorkerSettings) -> LoadEngine:
    set_environment(settings.num_threads)  # before torch is imported, which happens only here
    from allspark_workers.load import load_engine

    # What was imported stays: a full collection walks 180,000 objects of it otherwise, a third of a second.
    gc.freeze()
    return load_engine


def main(settings: WorkerSettings, load: LoadEngine | None = None) -> int:
    """Entry point of `allspark worker`. `load` replaces the engine (tests use a scripted one)."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(serve(settings, load or _real_engine(settings)))
    return 0
