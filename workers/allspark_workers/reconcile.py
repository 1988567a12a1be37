"""Brings the models of this worker to the state that the catalogue wants (R2)."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from allspark_bus.catalogue import WORKER_TARGET, Catalogue, ModelRecord
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


class Reconciler:
    """`host(name, engine)` makes a hosted model; `changed()` is called after every change of a state."""

    def __init__(
        self,
        catalogue: Catalogue,
        settings: WorkerSettings,
        load: LoadEngine,
        host: Callable[[str, EnginePort], HostedModel],
        changed: Callable[[], None],
        is_eligible: Callable[[ModelRecord], bool],
    ) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._load = load
        self._host = host
        self._changed = changed
        self._is_eligible = is_eligible
        self._entries: dict[str, Entry] = {}
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
        """The figures of a model as of now; zeros unless it runs here."""
        hosted = self.running(name)
        return hosted.stat() if hosted is not None else pb.AsEngineStat(model_name=name)

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
        while True:
            self._wake.clear()
            await self._pass()
            try:
                await asyncio.wait_for(self._wake.wait(), POLL_S)
            except TimeoutError:
                continue

    async def _pass(self) -> None:
        wanted = {n: r for n, r in (await self._catalogue.all()).items() if self._is_eligible(r)}
        for name in [n for n in self._entries if n not in wanted]:
            await self._drop(self._entries[name])
            del self._entries[name]
            self._changed()
        await asyncio.gather(*[self._comply(record) for record in wanted.values()])

    async def _comply(self, record: ModelRecord) -> None:
        entry = self._entries.get(record.name)
        if entry is not None and entry.config != record.config:
            await self._drop(entry)
            entry = None
        if entry is None:
            entry = self._entries[record.name] = Entry(record.name, record.config, record.generation)
        if entry.state == "failed":
            if time.monotonic() - entry.failed_s < RETRY_FAILED_S and entry.generation == record.generation:
                return
            entry.state, entry.status, entry.reason = "building", pb.ALLSPARK_SUCCESS, ""
        target = WORKER_TARGET[record.state]
        if entry.state == target and entry.generation == record.generation:
            return
        try:
            await self._move(entry, record, target)
        except (EngineError, FleetError, ValueError) as e:
            await self._fail(entry, record, e)
        except Exception as e:
            log.exception("model %r failed to become %s", record.name, target)
            await self._fail(entry, record, e)
        self._changed()

    async def _move(self, entry: Entry, record: ModelRecord, target: str) -> None:
        """One step of the life cycle after another until the target is reached."""
        if target == "unloaded":
            await self._drop(entry)
        else:
            if entry.hosted is None:
                await self._build(entry, record)
            hosted = entry.hosted
            assert hosted is not None
            if target == "running" and not hosted.is_running:
                self._set(entry, "starting")
                await asyncio.to_thread(hosted.start)
            elif target != "running" and hosted.is_running:
                await asyncio.to_thread(hosted.stop)
        entry.generation = record.generation
        self._set(entry, target)

    async def _build(self, entry: Entry, record: ModelRecord) -> None:
        self._set(entry, "building")
        config = model_config(record, self._settings)
        loop = asyncio.get_running_loop()

        def progress(fraction: float, _: str) -> None:
            loop.call_soon_threadsafe(self._report_progress, entry, fraction)

        engine = await asyncio.to_thread(self._load, config, progress)
        entry.hosted = self._host(record.name, engine)

    def _report_progress(self, entry: Entry, fraction: float) -> None:
        entry.progress = fraction
        self._changed()

    def _set(self, entry: Entry, state: str) -> None:
        log.info("model %r is %s", entry.name, state)
        entry.state = state
        self._changed()

    async def _fail(self, entry: Entry, record: ModelRecord, error: Exception) -> None:
        await self._drop(entry)
        entry.state, entry.generation, entry.failed_s = "failed", record.generation, time.monotonic()
        entry.reason = error.reason if isinstance(error, FleetError) else str(error) or repr(error)
        entry.status = status_of(error)
        log.error("model %r failed: %s", entry.name, entry.reason)

    async def _drop(self, entry: Entry) -> None:
        hosted, entry.hosted = entry.hosted, None
        if hosted is not None and hosted.is_running:
            await asyncio.to_thread(hosted.stop)


def status_of(error: Exception) -> "pb.AS_STATUS.ValueType":
    """What a client is told that caused this error."""
    if isinstance(error, FleetError):
        return error.status
    if isinstance(error, ValueError):
        return pb.ALLSPARK_PARAM_ERROR
    if isinstance(error, MemoryError):
        return pb.ALLSPARK_MEMORY_ERROR
    return next((s for cls, s in _STATUS.items() if isinstance(error, cls)), pb.ALLSPARK_RUNTIME_ERROR)
