"""Brings the models of this worker to the state that the catalogue wants (R2)."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from allspark_bus.catalogue import WORKER_TARGET, Catalogue, ModelRecord, ModelState
from allspark_bus.compute_unit import parse_unit
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_workers.convert import model_config
from allspark_workers.engine.errors import (
    AdapterLimitError,
    AdapterNotFoundError,
    EngineError,
    ModelIOError,
    ModelMemoryError,
    UnsupportedModelError,
)
from allspark_workers.hosted import HostedModel
from allspark_workers.ports import EnginePort, LoadEngine
from allspark_workers.settings import WorkerSettings

log = logging.getLogger(__name__)

POLL_S = 2.0  # the catalogue is read this often even if no broker says that it changed
RETRY_FAILED_S = 30.0  # a model that failed without its configuration being withdrawn is tried again
_STATUS: dict[type[EngineError], pb.AS_STATUS.ValueType] = {
    ModelIOError: pb.ALLSPARK_IO_ERROR,
    UnsupportedModelError: pb.ALLSPARK_PARAM_ERROR,
    ModelMemoryError: pb.ALLSPARK_MEMORY_ERROR,
    AdapterNotFoundError: pb.ALLSPARK_PARAM_ERROR,
    AdapterLimitError: pb.ALLSPARK_EXCEED_LIMIT_ERROR,
}


@dataclass(slots=True)
class Entry:
    """What this worker knows of one model. `state` is a state of fleet.WorkerModel."""

    name: str
    config: bytes
    generation: int
    state: str = "building"
    progress: float = 0.0
    status: "pb.AS_STATUS.ValueType" = pb.ALLSPARK_SUCCESS
    reason: str = ""
    failed_s: float = 0.0
    hosted: HostedModel | None = None


class Withdrawn(EngineError):
    """What is being loaded is not wanted any more."""


class Reconciler:
    """One task for each model that is not as it should be, so that a slow one holds up no other.

    `host(name, engine)` makes a hosted model; `stopped(hosted)` is called when one has stopped stepping, and
    `changed()` after every change of a state.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        settings: WorkerSettings,
        load: LoadEngine,
        host: Callable[[str, EnginePort], HostedModel],
        stopped: Callable[[HostedModel], None],
        changed: Callable[[], None],
    ) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._load = load
        self._host = host
        self._stopped = stopped
        self._changed = changed
        self._wanted: dict[str, ModelRecord] = {}
        self._entries: dict[str, Entry] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def nudge(self) -> None:
        """The catalogue has changed."""
        self._wake.set()

    def running(self, name: str) -> HostedModel | None:
        """The model if it takes requests."""
        entry = self._entries.get(name)
        return entry.hosted if entry is not None and entry.state == "running" else None

    def hosted(self) -> list[HostedModel]:
        """Every loaded model."""
        return [e.hosted for e in self._entries.values() if e.hosted is not None]

    def stat(self, name: str) -> pb.AsEngineStat:
        """The figures of a model as of now; zeros unless it runs here, or has run."""
        entry = self._entries.get(name)
        hosted = entry.hosted if entry is not None else None
        return (
            hosted.stat() if hosted is not None and hosted.has_figures else pb.AsEngineStat(model_name=name)
        )

    def describe(self) -> list[fleet.WorkerModel]:
        """What the broker is told."""
        return [self._message(e) for e in self._entries.values()]

    def _message(self, entry: Entry) -> fleet.WorkerModel:
        model = fleet.WorkerModel(
            name=entry.name,
            generation=entry.generation,
            state=entry.state,
            as_status=entry.status,
            reason=entry.reason,
            progress=entry.progress,
        )
        if entry.hosted is not None:
            entry.hosted.describe(model)
        return model

    async def run(self) -> None:
        """Reconciles for ever."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._pass()
                except FleetError as e:
                    log.error("the catalogue cannot be read, models stay as they are: %s", e.reason)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), POLL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _pass(self) -> None:
        everything = await self._catalogue.all()
        self._wanted = {n: r for n, r in everything.items() if self._is_eligible(r)}
        for name in {*self._wanted, *self._entries} - set(self._tasks):
            if not self._is_settled(name):
                self._tasks[name] = asyncio.ensure_future(self._follow(name))

    def _is_eligible(self, record: ModelRecord) -> bool:
        return parse_unit(record.model_config().compute_unit).fits(self._settings.device)

    def _is_settled(self, name: str) -> bool:
        record, entry = self._wanted.get(name), self._entries.get(name)
        if record is None or entry is None:
            return record is None and entry is None
        if entry.config != record.config or entry.generation != record.generation:
            return False
        if entry.state == "failed":
            return time.monotonic() - entry.failed_s < RETRY_FAILED_S
        return entry.state == WORKER_TARGET[record.state]

    async def _follow(self, name: str) -> None:
        """Brings one model to what is wanted of it, which may change meanwhile."""
        try:
            while not self._is_settled(name):
                await self._comply(name)
        except Exception:
            log.exception("model %r cannot be brought to what is wanted; it is tried again", name)
        finally:
            del self._tasks[name]

    async def _comply(self, name: str) -> None:
        record, entry = self._wanted.get(name), self._entries.get(name)
        if entry is not None and (record is None or entry.config != record.config):
            await self._drop(entry)
            del self._entries[name]
            entry = None
        if record is None:
            self._changed()
            return
        if entry is None:
            entry = self._entries[name] = Entry(name, record.config, record.generation)
        if entry.state == "failed":
            entry.state, entry.status, entry.reason = "building", pb.ALLSPARK_SUCCESS, ""
        try:
            await self._move(entry, record, WORKER_TARGET[record.state])
        except Withdrawn as e:
            log.info("model %r: %s", name, e)
            await self._drop(entry)
        except (EngineError, FleetError, ValueError) as e:
            await self._fail(entry, record, e)
        except Exception as e:
            log.exception("model %r failed to become %s", name, WORKER_TARGET[record.state])
            await self._fail(entry, record, e)
        self._changed()

    async def _move(self, entry: Entry, record: ModelRecord, target: str) -> None:
        """One step of the life cycle after another until the target is reached."""
        hosted = entry.hosted
        if target == "unloaded":
            if hosted is not None:  # else this worker began later: it loads at Reload
                await self._stop(entry, hosted)
                try:
                    resumes = record.before_unload == ModelState.RUNNING
                    threshold = record.model_config().swap_threshold
                    await asyncio.to_thread(hosted.unload, threshold, resumes=resumes)
                except UnsupportedModelError as e:
                    log.info("model %r is dropped instead, Reload reads it again: %s", entry.name, e)
                    await self._drop(entry)
        else:
            hosted = await self._loaded(entry, record)
            if target == "running" and not hosted.is_running:
                self._set(entry, "starting")
                await asyncio.to_thread(hosted.start)
            elif target != "running":
                await self._stop(entry, hosted)
        entry.generation = record.generation
        self._set(entry, target)

    async def _loaded(self, entry: Entry, record: ModelRecord) -> HostedModel:
        if entry.hosted is not None:
            if entry.hosted.is_unloaded:
                self._set(entry, "building")
                await asyncio.to_thread(entry.hosted.reload)
            return entry.hosted
        self._set(entry, "building")
        config = model_config(record, self._settings)
        loop = asyncio.get_running_loop()

        def progress(fraction: float, _: str) -> None:
            wanted = self._wanted.get(entry.name)
            if wanted is None or wanted.config != entry.config:
                raise Withdrawn("released or rebuilt while it was loading")
            loop.call_soon_threadsafe(self._report_progress, entry, fraction)

        engine = await asyncio.to_thread(self._load, config, progress)
        entry.hosted = self._host(record.name, engine)
        return entry.hosted

    def _report_progress(self, entry: Entry, fraction: float) -> None:
        entry.progress = fraction
        self._changed()

    def _set(self, entry: Entry, state: str) -> None:
        log.info("model %r is %s", entry.name, state)
        entry.state = state
        self._changed()

    async def _fail(self, entry: Entry, record: ModelRecord, error: Exception) -> None:
        """What is loaded stays, not running: a model that cannot start need not be loaded again."""
        if entry.hosted is not None:
            await self._stop(entry, entry.hosted)
        entry.state, entry.generation, entry.failed_s = "failed", record.generation, time.monotonic()
        entry.reason = error.reason if isinstance(error, FleetError) else str(error) or repr(error)
        entry.status = status_of(error)
        log.error("model %r failed: %s", entry.name, entry.reason)

    async def _stop(self, entry: Entry, hosted: HostedModel) -> None:
        if hosted.is_running:
            self._set(entry, "stopped")  # before, so that nothing more is dispatched to it
            await asyncio.to_thread(hosted.stop)
            self._stopped(hosted)

    async def _drop(self, entry: Entry) -> None:
        hosted, entry.hosted = entry.hosted, None
        if hosted is not None:
            await self._stop(entry, hosted)
            await asyncio.to_thread(hosted.close)


def status_of(error: Exception) -> "pb.AS_STATUS.ValueType":
    """What a client is told that caused this error."""
    if isinstance(error, FleetError):
        return error.status
    if isinstance(error, ValueError):
        return pb.ALLSPARK_PARAM_ERROR
    if isinstance(error, MemoryError):
        return pb.ALLSPARK_MEMORY_ERROR
    return next((s for cls, s in _STATUS.items() if isinstance(error, cls)), pb.ALLSPARK_RUNTIME_ERROR)
