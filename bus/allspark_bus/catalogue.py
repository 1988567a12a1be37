"""The catalogue: what models the fleet should have, and in which state (R2). Workers reconcile to it."""

from dataclasses import dataclass, replace
from enum import StrEnum

import msgpack
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_bus import keys
from allspark_bus.node import Arg
from allspark_bus.scripts import Script
from allspark_bus.store import Store

PUT = Script.load("put_model")


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

    async def put(self, record: ModelRecord) -> ModelRecord | None:
        """Writes over generation `record.generation` (0: a new one); None if somebody else was first."""
        # Named before, so that a record is never without; and after, in case somebody is just removing it.
        name = ("SADD", keys.MODELS, record.name)
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
        """One record."""
        h = await self._store.command(
            "HMGET", keys.model(name), "cfg", "state", "gen", "before", "owners", "facts", "prev"
        )
        if h[1] is None:
            return None
        owners = frozenset(o for o in h[4].decode().split(",") if o)
        state = ModelState(h[1].decode())
        return ModelRecord(name, h[0], state, int(h[2]), h[3].decode(), owners, h[5], h[6] or b"")

    async def all(self) -> dict[str, ModelRecord]:
        """Every record, by name."""
        names = sorted(n.decode() for n in await self._store.command("SMEMBERS", keys.MODELS))
        found = [await self.get(name) for name in names]
        return {r.name: r for r in found if r is not None}
