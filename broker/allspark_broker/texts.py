"""Requests with text: a worker that has the model's tokenizer turns it into ids, before admission."""

import logging
from collections.abc import Awaitable, Callable

from allspark_bus import text_inputs
from allspark_bus.catalogue import ModelRecord
from allspark_bus.errors import BrokerUnavailable, Denied, FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.workers import WorkerTable

log = logging.getLogger(__name__)

RETRY_MS = 1000
Control = Callable[[str, fleet.ControlCall], Awaitable[fleet.ControlReply]]


class Texts:
    """`control` asks one worker."""

    def __init__(self, table: WorkerTable, control: Control) -> None:
        self._table = table
        self._control = control

    async def put_ids(self, request: pb.StartRequestRequest, record: ModelRecord) -> None:
        """Adds the ids to a request with text; any other stays as it is.

        Raises FleetError: the worker's reason, or Denied or BrokerUnavailable without one that answers.
        """
        prompt = text_inputs.text_prompt(request, record.model_facts().max_length)
        if prompt is None:
            return
        call = fleet.ControlCall(tokenize=fleet.Tokenize(model_name=record.name))
        setattr(call.tokenize, prompt.kind, prompt.text)
        tokens = (await self._ask(record.name, call)).tokens
        text_inputs.put_ids(request, tokens.ids, list(tokens.eos_ids))

    async def _ask(self, model: str, call: fleet.ControlCall) -> fleet.ControlReply:
        """The first worker that answers; draining ones can read text as well."""
        workers = [w for w in self._table if model in w.models and w.models[model].state == "running"]
        silent: BrokerUnavailable | None = None
        for worker in sorted(workers, key=lambda w: (w.draining, w.last_seen_s * -1)):
            try:
                reply = await self._control(worker.worker_id, call)
            except BrokerUnavailable as e:
                log.warning("worker %s does not read text: %s", worker.worker_id, e.reason)
                silent = e
                continue
            if reply.as_status:
                raise FleetError(reply.reason, status=reply.as_status)
            return reply
        if silent is not None:
            raise silent
        raise Denied(
            f"no worker runs model {model!r} at the moment, so its tokenizer cannot be asked",
            retry_after_ms=RETRY_MS,
        )
