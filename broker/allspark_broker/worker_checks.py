"""What only a worker can tell of a request before it is recorded: about its adapter, and its document."""

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from allspark_bus.catalogue import ModelRecord
from allspark_bus.errors import BrokerUnavailable, FleetError
from allspark_bus.response_format import Document
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.workers import WorkerTable

log = logging.getLogger(__name__)

#: How long a good answer is remembered. An adapter that is taken away meanwhile fails its requests later, in
#: their terminal record.
REMEMBER_S: Final = 30.0
MAX_REMEMBERED: Final = 4096

Control = Callable[[str, fleet.ControlCall], Awaitable[fleet.ControlReply]]


class WorkerChecks:
    """`control` asks one worker.

    Both checks raise FleetError with the worker's status and reason. Without a worker that answers, the
    request is let through: the one that takes it decides.
    """

    def __init__(
        self, table: WorkerTable, control: Control, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._control = control
        self._clock = clock
        self._good: dict[tuple[str | int, ...], float] = {}  # in the order of their age

    async def adapter(self, record: ModelRecord, name: str) -> None:
        """Whether workers can serve the model with this adapter."""
        if name:
            call = fleet.ControlCall(check_adapter=fleet.CheckAdapter(model_name=record.name, lora_name=name))
            await self._check((record.name, record.generation, name), record, call)

    async def document(self, record: ModelRecord, document: Document | None) -> None:
        """Whether what a request's text has to be can be compiled within the workers' limits."""
        if document is not None:
            digest = hashlib.blake2b(document.text.encode(), digest_size=16).hexdigest()
            check = fleet.CheckDocument(kind=document.kind, text=document.text)
            await self._check((document.kind, digest), record, fleet.ControlCall(check_document=check))

    async def _check(self, key: tuple[str | int, ...], record: ModelRecord, call: fleet.ControlCall) -> None:
        if self._good.get(key, -REMEMBER_S) > self._clock() - REMEMBER_S:
            return
        worker = next((w for w in self._table if self._runs(record.name, w.models)), None)
        if worker is None:
            return
        try:
            reply = await self._control(worker.worker_id, call)
        except BrokerUnavailable as e:
            log.warning("%s for model %r is not known: %s", call.WhichOneof("call"), record.name, e.reason)
            return
        if reply.as_status:
            raise FleetError(reply.reason, status=reply.as_status)
        self._remember(key)

    def _runs(self, model: str, models: dict[str, fleet.WorkerModel]) -> bool:
        return model in models and models[model].state == "running"

    def _remember(self, key: tuple[str | int, ...]) -> None:
        self._good.pop(key, None)
        self._good[key] = self._clock()
        if len(self._good) > MAX_REMEMBERED:
            del self._good[next(iter(self._good))]
