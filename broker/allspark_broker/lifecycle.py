"""The life cycle of models (spec 1.2): catalogue changes, and waiting until the workers have complied."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from allspark_bus.catalogue import Catalogue, ModelRecord, ModelState
from allspark_bus.errors import Damaged, Denied, FleetError, InvalidCall, ParamError
from allspark_bus.ledger import Ending, Ledger
from allspark_proto import allspark_service_pb2 as pb

from allspark_broker.build import check_config
from allspark_broker.compliance import Compliance
from allspark_broker.workers import WorkerTable

log = logging.getLogger(__name__)

MAX_RACES = 20
ROLL_BACK_S = 30.0  # how long a failed Build waits until the workers have let go of what they had
BUSY = frozenset({ModelState.STOPPING, ModelState.RELEASING})

#: `cancel(request id, model, worker)` frees what an ended request holds in queues and on workers.
Cancel = Callable[[str, str, str], Awaitable[None]]


class Lifecycle:
    """Executes Build, Start, Stop, Release, Unload and Reload.

    `nudge` tells every worker to read the catalogue; `drain_s` is how long Stop and Release let requests
    go on before they end them.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        ledger: Ledger,
        table: WorkerTable,
        nudge: Callable[[], Awaitable[None]],
        cancel: Cancel,
        drain_s: float,
    ) -> None:
        self._catalogue = catalogue
        self._ledger = ledger
        self._nudge = nudge
        self._cancel = cancel
        self._drain_s = drain_s
        self._num_writes = 0
        self._builds: dict[bytes, asyncio.Task[None]] = {}
        self.models: dict[str, ModelRecord] = {}
        self.workers = Compliance(table, lambda name: self.models.get(name))

    async def refresh(self) -> None:
        """Takes over what is in the catalogue."""
        while True:
            num_writes = self._num_writes
            models = await self._catalogue.all()
            if num_writes == self._num_writes:  # else it may be older than what was just written here
                break
        self.models = models
        await self.workers.notify()

    async def make_sure(self, name: str) -> None:
        """Reads the catalogue again if by the copy here a model takes no requests.

        Another broker may have started it just now, or this one could not read for a while.
        """
        try:
            self.serving(name)
        except FleetError:
            await self.refresh()

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
        """Builds on every eligible worker, or nowhere; an identical Build joins the one in progress."""
        check_config(config)
        packed = config.SerializeToString(deterministic=True)
        for _ in range(MAX_RACES):
            record = await self._enter_build(config.model_name, packed, tenant)
            if record is not None:
                if not record.is_built:
                    await self.join_build(record)
                return
        raise Denied(f"model {config.model_name!r} is being changed by many calls at once; try again")

    async def _enter_build(self, name: str, config: bytes, tenant: str) -> ModelRecord | None:
        """Writes what should be built, or joins what is there; None if another call was faster."""
        old = await self._catalogue.get(name)
        if old is None:
            return await self._try_put(
                ModelRecord(name, config, ModelState.BUILT, owners=frozenset({tenant}))
            )
        if old.state in BUSY:
            raise Denied(f"model {name!r} is {old.state.value}; try again when that is over")
        if old.config == config:
            if tenant in old.owners:
                return old
            return await self._try_put(replace(old, owners=old.owners | {tenant}))
        if old.state is ModelState.RUNNING:
            raise InvalidCall(f"model {name!r} is running with another configuration: stop it first")
        if not old.is_built:
            raise Denied(
                f"model {name!r} is being built with another configuration; try again, or release it"
            )
        return await self._try_put(old.rebuilt(config, tenant))

    async def join_build(self, record: ModelRecord) -> None:
        """One wait and one roll-back for all calls that build the same here."""
        key = record.name.encode() + b"\0" + record.config
        task = self._builds.get(key)
        if task is None:
            task = self._builds[key] = asyncio.ensure_future(self._finish_build(record))
            task.add_done_callback(lambda _: self._builds.pop(key, None))
        await asyncio.shield(task)

    async def _finish_build(self, record: ModelRecord) -> None:
        try:
            worker = await self.workers.reached(record)
        except FleetError:
            await self._roll_back(record)
            raise
        facts = worker.models[record.name].facts.SerializeToString()
        for _ in range(MAX_RACES):
            now = await self._catalogue.get(record.name)
            if now is None or now.config != record.config:
                raise Denied(f"model {record.name!r} was changed or released by another call meanwhile")
            if now.is_built or await self._try_put(replace(now, facts=facts, previous=b"")) is not None:
                return

    async def _roll_back(self, record: ModelRecord) -> None:
        """Back to what was there before the Build; returns when the workers have let go of what they had."""
        for _ in range(MAX_RACES):
            now = await self._catalogue.get(record.name)
            if now is None or now.config != record.config or now.is_built:
                return
            before = now.restored()
            if before is not None and await self._try_put(before) is not None:
                return
            if before is None and await self._remove(now):
                break
        if not await self.workers.forgotten(record.name, ROLL_BACK_S):
            log.warning("model %r could not be built, and some worker still holds parts of it", record.name)

    async def start(self, name: str) -> None:
        """BUILT or STOPPED -> RUNNING on every worker that has it, or on none."""
        record = await self._known(name, unknown=InvalidCall)
        if record.state is ModelState.RUNNING:
            if self.workers.has_any(record):
                await self.workers.reached(record, by_any=True)
            return
        if record.state is ModelState.UNLOADED:
            raise InvalidCall(f"model {name!r} is unloaded: reload it first")
        if not record.is_built:
            raise InvalidCall(f"model {name!r} is still being built")
        before = record
        record = await self._put(replace(record, state=ModelState.RUNNING))
        try:
            worker = await self.workers.reached(record)
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
        await self.finish_stop(await self._put(replace(record, state=ModelState.STOPPING)))
        if unreleased := await self._ledger.num_unreleased(name, tenant):
            raise FleetError(
                f"model {name!r} is stopped; {unreleased} finished request(s) are not released yet",
                status=pb.ALLSPARK_RUNTIME_ERROR,
            )

    async def finish_stop(self, record: ModelRecord) -> None:
        """STOPPING -> STOPPED; also for a broker that takes over from one that died while it drained."""
        await self._drain(record.name)
        stopped = await self._try_put(replace(record, state=ModelState.STOPPED))
        if stopped is not None:  # else it is being released, and that stops it as well
            await self.workers.reached(stopped)

    async def release(self, name: str) -> None:
        """Frees the model everywhere; a running one is stopped first. A damaged record is just removed."""
        try:
            record = await self._known(name, unknown=InvalidCall, busy_is_denied=False)
        except Damaged as e:
            await self._discard(name, e.reason)
            return
        if record.state in (ModelState.RUNNING, ModelState.STOPPING):
            record = await self._put(replace(record, state=ModelState.RELEASING))
        await self.finish_release(record)

    async def finish_release(self, record: ModelRecord) -> None:
        """RELEASING or at rest -> absent; also for a broker that takes over from one that died."""
        if record.state is ModelState.RELEASING:
            await self._drain(record.name)
        if not await self._remove(record) and await self._catalogue.get(record.name) is not None:
            raise Denied(f"model {record.name!r} was changed by another call at the same time; try again")
        if not await self.workers.forgotten(record.name, self._drain_s):
            log.warning("model %r is released, but some worker has not freed it yet", record.name)

    async def unload(self, name: str) -> None:
        """BUILT, RUNNING or STOPPED without live requests -> UNLOADED."""
        record = await self._known(name, unknown=ParamError)
        if record.state is ModelState.UNLOADED:
            return
        if not record.is_built:
            raise InvalidCall(f"model {name!r} is still being built")
        await self._check_idle(name)
        if record.model_config().swap_threshold < 0:
            raise InvalidCall(f"model {name!r} was built with swap_threshold -1: swapping is off")
        before = record
        record = await self._put(replace(record, state=ModelState.UNLOADED, before_unload=record.state.value))
        try:
            await self._check_idle(name)  # one may have been admitted while this call changed the state
            await self.workers.reached(record)
        except FleetError:
            await self._try_put(replace(record, state=before.state, before_unload=""))
            raise

    async def _check_idle(self, name: str) -> None:
        if live := await self._ledger.num_open(name):
            raise Denied(
                f"model {name!r} has {live} live request(s); try again when they have ended",
                retry_after_ms=1000,
            )

    async def reload(self, name: str) -> None:
        """UNLOADED -> the state before."""
        if await self._catalogue.get(name) is None:
            raise FleetError(f"model {name!r} is unknown", status=pb.ALLSPARK_RUNTIME_ERROR)
        record = await self._known(name, unknown=ParamError)
        if record.state is not ModelState.UNLOADED:
            return
        before = record
        record = await self._put(
            replace(record, state=ModelState(record.before_unload or "built"), before_unload="")
        )
        try:
            await self.workers.reached(record)
        except FleetError:
            await self._try_put(
                replace(record, state=ModelState.UNLOADED, before_unload=before.before_unload)
            )
            raise

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
            self._num_writes += 1
            self.models[record.name] = written
            await self._nudge()
            await self.workers.notify()
        return written

    async def _put(self, record: ModelRecord) -> ModelRecord:
        written = await self._try_put(record)
        if written is None:
            raise Denied(f"model {record.name!r} was changed by another call at the same time; try again")
        return written

    async def _remove(self, record: ModelRecord) -> bool:
        if not await self._catalogue.remove(record):
            return False
        self._num_writes += 1
        self.models.pop(record.name, None)
        await self._nudge()
        await self.workers.notify()
        return True

    async def _discard(self, name: str, why: str) -> None:
        log.warning("%s: it is removed without a drain", why)
        await self._catalogue.discard(name)
        self._num_writes += 1
        self.models.pop(name, None)
        for rid in await self._ledger.open_requests(name):
            await self.end_request(rid, name, f"model {name!r} was released")
        await self._nudge()
        await self.workers.notify()

    async def _drain(self, name: str) -> None:
        """Waits for open requests, then ends those that outlive the limit."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._drain_s
        while await self._ledger.num_open(name) and loop.time() < limit:
            await self.workers.until(lambda: False, 0.1)
        message = f"model {name!r} was stopped and its drain limit of {self._drain_s:g} s has passed"
        for rid in await self._ledger.open_requests(name):
            await self.end_request(rid, name, message)

    async def end_request(self, rid: str, model: str, message: str) -> None:
        """Ends a request whose model does not serve any more."""
        _, worker = await self._ledger.finish(rid, Ending(pb.GenerateInterrupted, "model_stopped", message))
        await self._cancel(rid, model, worker)
