"""The catalogue: what models the fleet should have, and in which state (R2). Workers reconcile to it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import msgpack
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_bus import damage, keys
from allspark_bus.compute_unit import parse_unit
from allspark_bus.errors import Damaged
from allspark_bus.round_trip import Arg
from allspark_bus.scripts import ALLOW_OOM, ANYWAY, Script
from allspark_bus.store import Store

log = logging.getLogger(__name__)

PUT = Script.load("put_model", ALLOW_OOM)
REPORT_S = 30.0  # a damaged record is logged this often


class ModelState(StrEnum):
    """Desired state of a model; the first four are what workers report having reached."""

    BUILT = "built"
    RUNNING = "running"
    UNLOADED = "unloaded"
    STOPPED = "stopped"
    STOPPING = "stopping"
    RELEASING = "releasing"


#: What a worker does to comply with a desired state.
WORKER_TARGET = {
    ModelState.BUILT: "built",
    ModelState.RUNNING: "running",
    ModelState.UNLOADED: "unloaded",
    ModelState.STOPPED: "stopped",
    ModelState.STOPPING: "running",
    ModelState.RELEASING: "running",
}


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model. `generation` rises with every change, also over a release and a new Build of the name.

    `before_unload` is where Reload goes back to; `owners` are the tenants that built it; `facts` is empty
    until the build has finished; `previous` holds what a failed rebuild returns to, while it goes on.
    """

    name: str
    config: bytes
    state: ModelState
    generation: int = 0
    before_unload: str = ""
    owners: frozenset[str] = frozenset()
    facts: bytes = b""
    previous: bytes = b""

    def rebuilt(self, config: bytes, tenant: str) -> "ModelRecord":
        """The record of a Build with another configuration, which remembers this one."""
        fields = [self.config, self.state.value, self.before_unload, sorted(self.owners), self.facts]
        return ModelRecord(
            self.name,
            config,
            ModelState.BUILT,
            self.generation,
            owners=self.owners | {tenant},
            previous=msgpack.packb(fields),
        )

    def restored(self) -> "ModelRecord | None":
        """The record before the rebuild that is going on; None if there was none."""
        if not self.previous:
            return None
        config, state, before_unload, owners, facts = msgpack.unpackb(self.previous)
        return ModelRecord(
            self.name, config, ModelState(state), self.generation, before_unload, frozenset(owners), facts
        )

    def model_config(self) -> pb.ModelStructConfig:
        """The configuration it was built from."""
        return pb.ModelStructConfig.FromString(self.config)

    def model_facts(self) -> fleet.ModelFacts:
        """What admission needs to know."""
        return fleet.ModelFacts.FromString(self.facts)

    @property
    def is_built(self) -> bool:
        return bool(self.facts)

    def _fields(self) -> list[Arg]:
        owners = ",".join(sorted(self.owners))
        pairs: dict[str, Arg] = {
            "cfg": self.config,
            "state": self.state.value,
            "before": self.before_unload,
            "owners": owners,
            "facts": self.facts,
            "prev": self.previous,
        }
        return [x for pair in pairs.items() for x in pair]


class Catalogue:
    """Typed access to the records."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[str, ModelRecord] = {}
        self._reported_s: dict[str, float] = {}

    async def put(self, record: ModelRecord) -> ModelRecord | None:
        """Writes over generation `record.generation` (0: a new one); None if somebody else was first."""
        # Named before, so that a record is never without; and after, in case somebody is just removing it.
        name = ANYWAY.command([keys.MODELS], ["SADD", record.name])
        put = PUT.command([keys.model(record.name)], [record.generation, *record._fields()])
        _, (done, generation), _ = await self._store.in_order([name], [put], [name])
        return replace(record, generation=int(generation)) if done else None

    async def remove(self, record: ModelRecord) -> bool:
        """Removes generation `record.generation`; False if somebody changed it."""
        done, _ = await self._store.script(PUT, [keys.model(record.name)], [record.generation])
        if done:
            await self._store.command("SREM", keys.MODELS, record.name)
        return bool(done)

    async def get(self, name: str) -> ModelRecord | None:
        """One record. Raises Damaged."""
        with damage.named(f"model {name!r}, which must be released and built again"):
            h = await self._store.command(
                "HMGET", keys.model(name), "cfg", "state", "gen", "before", "owners", "facts", "prev"
            )
            return _record(name, h) if any(h) else None

    async def all(self) -> dict[str, ModelRecord]:
        """Every record, by name; of one that was damaged since, what it was before."""
        names = await self._store.command("SMEMBERS", keys.MODELS)
        found = {}
        for name in sorted(n.decode("utf-8", "replace") for n in names):
            try:
                record = await self.get(name)
            except Damaged as error:
                record = self._last.get(name)
                self._report(name, error)
            if record is not None:
                found[name] = record
        self._last = found
        return found

    async def discard(self, name: str) -> None:
        """Removes a record that is damaged, whatever is in it."""
        await self._store.in_order([("DEL", keys.model(name))], [("SREM", keys.MODELS, name)])
        self._last.pop(name, None)

    def _report(self, name: str, error: Damaged) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s.get(name, float("-inf")) >= REPORT_S:
            self._reported_s[name] = now_s
            log.error("%s", error.reason)


def _record(name: str, h: Sequence[bytes | None]) -> ModelRecord:
    config, state, generation, before, owners, facts, previous = [value or b"" for value in h]
    record = ModelRecord(
        name,
        config,
        ModelState(state.decode()),
        int(generation),
        before.decode(),
        frozenset(owner for owner in owners.decode().split(",") if owner),
        facts,
        previous,
    )
    # Read here once, so that no reader of the record has to expect damage in its parts.
    parse_unit(record.model_config().compute_unit)
    record.model_facts()
    record.restored()
    ModelState(record.before_unload or ModelState.BUILT)
    return record
