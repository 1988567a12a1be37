"""What the broker can say about the fleet: statistics and status (spec 2.6.5). Pure."""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping

from allspark_bus.catalogue import WORKER_TARGET, ModelRecord
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.queue import RequestQueue
from allspark_broker.workers import Worker, WorkerTable

_SUMS = (
    "total_span",
    "used_span",
    "free_span",
    "free_token",
    "pendding_request",
    "running_request",
    "total_device_memory_pool_size",
    "used_device_memory_pool_size",
    "generate_token_persec",
    "process_token_persec",
)
_COUNTERS = (
    "total_generated_token",
    "total_prefill_token",
    "prefix_cache_hit_token",
    "prefix_cache_miss_token",
)


class EngineStats:
    """Sums over the workers of a model; counters stay monotonic when a worker leaves."""

    def __init__(self) -> None:
        self._retired: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_COUNTERS, 0))

    def retire(self, worker: Worker) -> None:
        """Keeps the counters of a worker that is gone."""
        for name, model in worker.models.items():
            for counter in _COUNTERS:
                self._retired[name][counter] += getattr(model.stat, counter)

    def forget(self, model: str) -> None:
        """Drops what was kept for a released model."""
        self._retired.pop(model, None)

    def keep(self, models: Container[str]) -> None:
        """Forgets all other models: they may have been released through another broker."""
        for name in [n for n in self._retired if n not in models]:
            del self._retired[name]

    def of(self, name: str, table: WorkerTable, num_queued: int) -> pb.AsEngineStat:
        """The fleet-wide figures; zeros with the name when nobody runs it."""
        total = pb.AsEngineStat(model_name=name)
        stats = [w.models[name].stat for w in table if name in w.models]
        for stat in stats:
            for field in (*_SUMS, *_COUNTERS):
                setattr(total, field, getattr(total, field) + getattr(stat, field))
        for counter, value in self._retired.get(name, {}).items():
            setattr(total, counter, getattr(total, counter) + value)
        sizes = {s.span_size for s in stats if s.span_size}
        total.span_size = sizes.pop() if len(sizes) == 1 else 0
        total.pendding_request += num_queued
        seen = total.prefix_cache_hit_token + total.prefix_cache_miss_token
        if seen:
            total.prefix_cache_hit_rate = total.prefix_cache_hit_token / seen
            total.prefix_cache_miss_rate = 1.0 - total.prefix_cache_hit_rate
        return total


def _progress(name: str, table: WorkerTable) -> float:
    """How far the workers that are loading a model have come, on average."""
    loading = [
        w.models[name].progress for w in table if name in w.models and w.models[name].state == "building"
    ]
    return sum(loading) / len(loading) if loading else 0.0


def fleet_status(
    models: Mapping[str, ModelRecord],
    table: WorkerTable,
    queues: Mapping[str, RequestQueue],
    clock: Callable[[], float],
) -> fleet.FleetStatus:
    """What `allspark status` shows."""
    now = clock()
    status = fleet.FleetStatus(
        queued_requests=sum(len(q) for q in queues.values()), inflight_requests=table.num_flights()
    )
    for name, record in sorted(models.items()):
        target = WORKER_TARGET[record.state]
        there = [w for w in table if name in w.models and w.models[name].state == target]
        status.models.add(
            name=name,
            state=record.state.value if record.is_built else "building",
            workers=len(there),
            queued_requests=len(queues[name]) if name in queues else 0,
            generation=record.generation,
            progress=_progress(name, table),
        )
    for worker in sorted(table, key=lambda w: w.worker_id):
        status.workers.add(
            worker_id=worker.worker_id,
            device=worker.device,
            draining=worker.draining,
            inflight_requests=len(worker.flights),
            capacity=sum(m.capacity for m in worker.models.values()),
            last_seen_s=now - worker.last_seen_s,
            store_silent_s=worker.store_silent_s,
        )
    return status
