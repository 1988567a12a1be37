"""The life cycle of models (spec 1.2): catalogue changes, and waiting until the workers have complied."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from allspark_bus.catalogue import WORKER_TARGET, Catalogue, ModelRecord, ModelState
from allspark_bus.compute_unit import parse_unit
from allspark_bus.errors import Denied, FleetError, InvalidCall, ParamError
from allspark_bus.ledger import Ending, Ledger
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.build import check_config
from allspark_broker.workers import Worker, WorkerTable

log = logging.getLogger(__name__)

WAIT_FOR_WORKER_S = 15.0  # how long Build and Start wait for a first eligible worker
MAX_RACES = 20
BUSY = frozenset({ModelState.STOPPING, ModelState.RELEASING})
_DISABLED_SWAP = -1


class Lifecycle:
    """Executes Build, Start, Stop, Release, Unload and Reload.

    `nudge` tells every worker to read the catalogue; `changed` is notified whenever a worker reports.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        ledger: Ledger,
        table: WorkerTable,
        nudge: Callable[[], Awaitable[None]],
        drain_s: float,
    ) -> None:
        self._catalogue = catalogue
        self._ledger = ledger
        self._table = table
        self._nudge = nudge
        self._drain_s = drain_s
        self.models: dict[str, ModelRecord] = {}
        self.changed = asyncio.Condition()

    async def refresh(self) -> None:
        """Takes over what is in the catalogue."""
        self.models = await self._catalogue.all()

    async def notify(self) -> None:
        """Wakes calls that wait for workers."""
        async with self.changed:
            self.changed.notify_all()

    def serving(self, name: str) -> ModelRecord:
        """The record of a model that takes requests; raises what StartRequest answers otherwise."""
        record = self.models.get(name)
        if record is None:
            raise ParamError(f"model {name!r} is unknown: build it first")
        if record.state in (ModelState.BUILT, ModelState.UNLOADED) or not record.is_built:
            raise InvalidCall(f"model {name!r} is {record.state.value}, not started")
        if record.state is not ModelState.RUNNING:
            raise Denied(f"model {name!r} is {record.state.value} and takes no requests")
        return record

    # ---- the six calls ----------------------------------------------------------------------------

    async def build(self, config: pb.ModelStructConfig, tenant: str) -> None:
        """Builds on every eligible worker, or nowhere; a repeated identical Build joins the first."""
        check_config(config)
        for _ in range(MAX_RACES):
            old = await self._catalogue.get(config.model_name)
            record = await self._enter_build(config, old, tenant)
            if record is not None:
                if not record.is_built:
                    await self._finish_build(record, old)
                return
        raise Denied(f"model {config.model_name!r} is being changed by many calls at once; try again")

    async def _enter_build(
        self, config: pb.ModelStructConfig, old: ModelRecord | None, tenant: str
    ) -> ModelRecord | None:
        """Writes what should be built, or joins what is there; None if another call was faster."""
        packed = config.SerializeToString(deterministic=True)
        if old is None or old.config != packed:
            self._check_may_rebuild(old, config.model_name)
            generation, owners = (old.generation, old.owners) if old else (0, frozenset[str]())
            new = ModelRecord(
                config.model_name, packed, ModelState.BUILT, generation=generation, owners=owners | {tenant}
            )
            return await self._try_put(new)
        if old.state in BUSY:
            raise Denied(f"model {old.name!r} is {old.state.value}; try again when that is over")
        if tenant in old.owners:
            return old
        return await self._try_put(replace(old, owners=old.owners | {tenant}))

    def _check_may_rebuild(self, old: ModelRecord | None, name: str) -> None:
        if old is None:
            return
        if old.state is ModelState.RUNNING:
            raise InvalidCall(f"model {name!r} is running with another configuration: stop it first")
        if old.state in BUSY:
            raise Denied(f"model {name!r} is {old.state.value}; try again when that is over")

    async def _finish_build(self, record: ModelRecord, old: ModelRecord | None) -> None:
        try:
            worker = await self._reached(record)
        except FleetError:
            await self._roll_back(record, old)
            raise
        facts = worker.models[record.name].facts.SerializeToString()
        for _ in range(MAX_RACES):
            now = await self._catalogue.get(record.name)
            if now is None or now.config != record.config or now.is_built:
                return
            if await self._try_put(replace(now, facts=facts)) is not None:
                return

    async def _roll_back(self, record: ModelRecord, old: ModelRecord | None) -> None:
        now = await self._catalogue.get(record.name)
        if now is None or now.generation != record.generation:
            return
        if old is None or old.config == record.config:
            await self._catalogue.remove(now)
        else:
            await self._catalogue.put(replace(old, generation=now.generation))
        await self.refresh()
        await self._nudge()

    async def start(self, name: str) -> None:
        """BUILT or STOPPED -> RUNNING on every worker that has it."""
        record = await self._known(name, unknown=InvalidCall)
        if record.state is ModelState.RUNNING:
            return
        if record.state is ModelState.UNLOADED:
            raise InvalidCall(f"model {name!r} is unloaded: reload it first")
        if not record.is_built:
            raise InvalidCall(f"model {name!r} is still being built")
        before = record
        record = await self._put(replace(record, state=ModelState.RUNNING))
        try:
            worker = await self._reached(record)
        except FleetError:
            await self._try_put(replace(record, state=before.state))
            raise
        facts = worker.models[name].facts
        if facts.kv_tokens and facts.SerializeToString() != record.facts:
            await self._try_put(replace(record, facts=facts.SerializeToString()))

    async def stop(self, name: str, tenant: str) -> None:
        """Drains, then RUNNING -> STOPPED; raises RUNTIME_ERROR if it left unreleased results."""
        record = await self._known(name, unknown=InvalidCall)
        if record.state is not ModelState.RUNNING:
            return
        record = await self._put(replace(record, state=ModelState.STOPPING))
        await self._drain(name)
        record = await self._put(replace(record, state=ModelState.STOPPED))
        await self._reached(record)
        if unreleased := await self._ledger.num_unreleased(name, tenant):
            raise FleetError(
                f"model {name!r} is stopped; {unreleased} finished request(s) are not released yet",
                status=pb.ALLSPARK_RUNTIME_ERROR,
            )

    async def release(self, name: str) -> None:
        """Frees the model everywhere; a running one is stopped first."""
        record = await self._known(name, unknown=InvalidCall, busy_is_denied=False)
        if record.state is ModelState.RUNNING:
            record = await self._put(replace(record, state=ModelState.RELEASING))
        await self._drain(name)
        now = await self._catalogue.get(name)
        if now is None or not await self._catalogue.remove(now):
            raise Denied(f"model {name!r} was changed by another call; try again")
        await self.refresh()
        await self._nudge()
        await self._until(lambda: all(name not in w.models for w in self._table), self._drain_s)

    async def unload(self, name: str) -> None:
        """BUILT, RUNNING or STOPPED without live requests -> UNLOADED."""
        record = await self._known(name, unknown=ParamError)
        if record.state is ModelState.UNLOADED:
            return
        if record.model_config().swap_threshold <= _DISABLED_SWAP:
            raise InvalidCall(f"model {name!r} was built with swap_threshold < 0: swapping is disabled")
        if live := await self._ledger.num_open(name):
            raise Denied(f"model {name!r} has {live} live request(s); try again when they have ended")
        record = await self._put(replace(record, state=ModelState.UNLOADED, before_unload=record.state.value))
        await self._reached(record)

    async def reload(self, name: str) -> None:
        """UNLOADED -> the state before."""
        record = self.models.get(name) or await self._catalogue.get(name)
        if record is None:
            raise FleetError(f"model {name!r} is unknown", status=pb.ALLSPARK_RUNTIME_ERROR)
        record = await self._known(name, unknown=ParamError)
        if record.state is not ModelState.UNLOADED:
            return
        record = await self._put(
            replace(record, state=ModelState(record.before_unload or "built"), before_unload="")
        )
        await self._reached(record)

    async def disown(self, tenant: str) -> None:
        """A tenant leaves: models that nobody else built are released."""
        for record in (await self._catalogue.all()).values():
            if tenant not in record.owners:
                continue
            if record.owners == {tenant}:
                await self.release(record.name)
            else:
                await self._put(replace(record, owners=record.owners - {tenant}))

    # ---- parts ------------------------------------------------------------------------------------

    async def _known(
        self, name: str, *, unknown: type[FleetError], busy_is_denied: bool = True
    ) -> ModelRecord:
        record = await self._catalogue.get(name)
        if record is None:
            raise unknown(f"model {name!r} is unknown: build it first")
        if busy_is_denied and record.state in BUSY:
            raise Denied(f"model {name!r} is {record.state.value}; try again when that is over")
        return record

    async def _try_put(self, record: ModelRecord) -> ModelRecord | None:
        written = await self._catalogue.put(record)
        if written is not None:
            self.models[record.name] = written
            await self._nudge()
        return written

    async def _put(self, record: ModelRecord) -> ModelRecord:
        written = await self._try_put(record)
        if written is None:
            raise Denied(f"model {record.name!r} was changed by another call at the same time; try again")
        return written

    def _reports(self, record: ModelRecord) -> list[tuple[Worker, fleet.WorkerModel | None]]:
        workers = self._table.eligible(parse_unit(record.model_config().compute_unit).fits)
        return [(w, w.models.get(record.name)) for w in workers]

    async def _reached(self, record: ModelRecord) -> Worker:
        """Waits until every eligible worker has complied; one of them. Raises the first failure."""
        target = WORKER_TARGET[record.state]
        unit = record.model_config().compute_unit
        device = f"device {unit!r}" if unit else "any device"
        if not await self._until(lambda: bool(self._reports(record)), WAIT_FOR_WORKER_S):
            raise Denied(f"no worker for {device} is connected", retry_after_ms=1000)

        def answer() -> bool:
            reports = [m for _, m in self._reports(record)]
            return any(_failed(m, record) for m in reports) or all(
                _complies(m, record, target) for m in reports
            )

        await self._until(lambda: not self._reports(record) or answer(), None)
        reports = self._reports(record)
        if not reports:
            raise Denied(f"every worker for {device} left before model {record.name!r} was {target}")
        for worker, model in reports:
            if model is not None and _failed(model, record):
                raise FleetError(
                    f"worker {worker.worker_id}: {model.reason}",
                    status=model.as_status or pb.ALLSPARK_UNKNOWN_ERROR,
                )
        return reports[0][0]

    async def _until(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        async with self.changed:
            try:
                await asyncio.wait_for(self.changed.wait_for(predicate), timeout_s)
            except TimeoutError:
                return False
        return True

    async def _drain(self, name: str) -> None:
        """Waits for open requests, then ends those that outlive the limit."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._drain_s
        while await self._ledger.num_open(name) and loop.time() < limit:
            await self._until(lambda: False, 0.1)
        message = f"model {name!r} was stopped and its drain limit of {self._drain_s:g} s has passed"
        for rid in await self._ledger.open_requests(name):
            await self._ledger.finish(rid, Ending(pb.GenerateInterrupted, "model_stopped", message))


def _failed(model: fleet.WorkerModel | None, record: ModelRecord) -> bool:
    return model is not None and model.generation >= record.generation and model.state == "failed"


def _complies(model: fleet.WorkerModel | None, record: ModelRecord, target: str) -> bool:
    return model is not None and model.generation >= record.generation and model.state == target
