"""The catalogue: what models the fleet should have, and in which state (R2). Workers reconcile to it."""

from dataclasses import dataclass, replace
from enum import StrEnum

from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_bus import keys
from allspark_bus.scripts import Script
from allspark_bus.store import Arg, Store

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
    """One model. `generation` rises with every change; `before_unload` is where Reload goes back to.

    `facts` is empty until the first build has finished; `owners` are the tenants that built it.
    """

    name: str
    config: bytes
    state: ModelState
    generation: int = 0
    before_unload: str = ""
    owners: frozenset[str] = frozenset()
    facts: bytes = b""

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
        }
        return [x for pair in pairs.items() for x in pair]


class Catalogue:
    """Typed access to the records."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, record: ModelRecord) -> ModelRecord | None:
        """Writes over generation `record.generation` (0: a new one); None if somebody else was first."""
        await self._store.command("SADD", keys.MODELS, record.name)
        done, generation = await self._store.script(
            PUT, [keys.model(record.name)], [record.generation, *record._fields()]
        )
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
            "HMGET", keys.model(name), "cfg", "state", "gen", "before", "owners", "facts"
        )
        if h[1] is None:
            return None
        owners = frozenset(o for o in h[4].decode().split(",") if o)
        return ModelRecord(name, h[0], ModelState(h[1].decode()), int(h[2]), h[3].decode(), owners, h[5])

    async def all(self) -> dict[str, ModelRecord]:
        """Every record, by name."""
        names = sorted(n.decode() for n in await self._store.command("SMEMBERS", keys.MODELS))
        found = [await self.get(name) for name in names]
        return {r.name: r for r in found if r is not None}
