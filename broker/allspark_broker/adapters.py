"""Whether the adapter that a request names can be served: its files lie with the workers, so one is asked."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from allspark_bus.catalogue import ModelRecord
from allspark_bus.errors import BrokerUnavailable, FleetError
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.workers import WorkerTable

log = logging.getLogger(__name__)

#: How long a good answer is remembered. An adapter that is taken away meanwhile fails its requests later, in
#: their terminal record.
REMEMBER_S: Final = 30.0
MAX_REMEMBERED: Final = 4096

Control = Callable[[str, fleet.ControlCall], Awaitable[fleet.ControlReply]]


class AdapterCheck:
    """`control` asks one worker."""

    def __init__(
        self, table: WorkerTable, control: Control, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._control = control
        self._clock = clock
        self._good: dict[tuple[str, int, str], float] = {}  # in the order of their age

    async def check(self, record: ModelRecord, name: str) -> None:
        """Raises FleetError with the worker's status and reason for an adapter that it cannot serve.

        Without a worker that answers the request is let through: the one that takes it decides.
        """
        key = (record.name, record.generation, name)
        if not name or self._good.get(key, -REMEMBER_S) > self._clock() - REMEMBER_S:
            return
        worker = next((w for w in self._table if self._runs(record.name, w.models)), None)
        if worker is None:
            return
        call = fleet.ControlCall(check_adapter=fleet.CheckAdapter(model_name=record.name, lora_name=name))
        try:
            reply = await self._control(worker.worker_id, call)
        except BrokerUnavailable as e:
            log.warning("adapter %r of model %r is not checked: %s", name, record.name, e.reason)
            return
        if reply.as_status:
            raise FleetError(reply.reason, status=reply.as_status)
        self._remember(key)

    def _runs(self, model: str, models: dict[str, fleet.WorkerModel]) -> bool:
        return model in models and models[model].state == "running"

    def _remember(self, key: tuple[str, int, str]) -> None:
        self._good.pop(key, None)
        self._good[key] = self._clock()
        if len(self._good) > MAX_REMEMBERED:
            del self._good[next(iter(self._good))]
