"""Waiting until the workers have done what the catalogue says."""

import asyncio
from collections.abc import Callable

from allspark_bus.catalogue import WORKER_TARGET, ModelRecord
from allspark_bus.compute_unit import parse_unit
from allspark_bus.errors import Denied, FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.workers import Worker, WorkerTable

WAIT_FOR_WORKER_S = 15.0  # how long a change waits for a first eligible worker


class Compliance:
    """What workers report, against what is wanted. `current(name)` is the newest record of a model."""

    def __init__(self, table: WorkerTable, current: Callable[[str], ModelRecord | None]) -> None:
        self._table = table
        self._current = current
        self._changed = asyncio.Condition()

    async def notify(self) -> None:
        """Something was reported, or a record changed: those who wait look again."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        """Whether it became true in time; looked at after every change."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(predicate), timeout_s)
            except TimeoutError:
                return False
        return True

    async def reached(self, record: ModelRecord, *, by_any: bool = False) -> Worker:
        """Waits until every eligible worker (or any) has complied with a record; one that has.

        Raises the first failure of a worker, and Denied without workers or when another call changes or
        releases the model meanwhile.
        """
        unit = record.model_config().compute_unit
        device = f"device {unit!r}" if unit else "any device"
        await self.until(lambda: bool(self._reports(record)) or self._is_overtaken(record), WAIT_FOR_WORKER_S)
        if not self._reports(record) and not self._is_overtaken(record):
            raise Denied(f"no worker for {device} is connected", retry_after_ms=1000)
        await self.until(lambda: self._is_settled(record, by_any=by_any), None)
        reports = self._reports(record)
        complying = [w for w, m in reports if _complies(m, record)]
        if by_any and complying:
            return complying[0]
        for worker, model in reports:
            if model is not None and _has_failed(model, record):
                raise FleetError(
                    f"worker {worker.worker_id}: {model.reason}",
                    status=model.as_status or pb.ALLSPARK_UNKNOWN_ERROR,
                )
        if self._is_overtaken(record):
            raise Denied(f"model {record.name!r} was changed or released by another call meanwhile")
        if not complying:
            target = WORKER_TARGET[record.state]
            raise Denied(f"every worker for {device} left before model {record.name!r} was {target}")
        return complying[0]

    def has_any(self, record: ModelRecord) -> bool:
        """Whether a worker is connected that could have the model."""
        return bool(self._reports(record))

    async def forgotten(self, name: str, timeout_s: float) -> bool:
        """Whether within the time no worker has anything of a model any more."""
        return await self.until(lambda: all(name not in w.models for w in self._table), timeout_s)

    def _is_settled(self, record: ModelRecord, *, by_any: bool) -> bool:
        reports = [m for _, m in self._reports(record)]
        if not reports or self._is_overtaken(record):
            return True
        complying = [_complies(m, record) for m in reports]
        failed = [_has_failed(m, record) for m in reports]
        if by_any:
            return any(complying) or all(failed)
        return any(failed) or all(complying)

    def _is_overtaken(self, record: ModelRecord) -> bool:
        now = self._current(record.name)
        if now is None or now.config != record.config:
            return True
        return now.generation > record.generation and WORKER_TARGET[now.state] != WORKER_TARGET[record.state]

    def _reports(self, record: ModelRecord) -> list[tuple[Worker, fleet.WorkerModel | None]]:
        workers = self._table.eligible(parse_unit(record.model_config().compute_unit).fits)
        return [(w, w.models.get(record.name)) for w in workers]


def _has_failed(model: fleet.WorkerModel | None, record: ModelRecord) -> bool:
    return model is not None and model.generation >= record.generation and model.state == "failed"


def _complies(model: fleet.WorkerModel | None, record: ModelRecord) -> bool:
    target = WORKER_TARGET[record.state]
    return model is not None and model.generation >= record.generation and model.state == target
