"""Calls that the broker answers: each becomes one envelope and one reply."""

import uuid as uuid_lib
from collections.abc import Awaitable, Callable
from typing import Any

from allspark_bus import keys
from allspark_bus.broker_client import BrokerClient, raise_for
from allspark_bus.errors import ParamError
from allspark_bus.ledger import Ledger, now_ms
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import metadata
from google.protobuf.message import Message

from allspark_gateway import answers
from allspark_gateway.answers import Context
from allspark_gateway.denials import Denials
from allspark_gateway.settings import GatewaySettings

Handler = Callable[[Any, Context], Awaitable[object]]

MAX_DEADLINE_MS = 10 * 365 * 86_400_000

#: RPC -> the envelope's call; answered with a status only, after workers did something.
MODEL_CALLS = {
    "BuildModelFromConfigStruct": "build_model",
    "ReloadModelToDeviceMemory": "reload_model",
    "UnloadModelFromDeviceMemory": "unload_model",
    "StartModel": "start_model",
    "StopModel": "stop_model",
    "ReleaseModel": "release_model",
    "ShutdownService": "shutdown_service",
}
#: RPC -> the envelope's call; answered with a status and the uuid.
REQUEST_CALLS = {"StopRequest": "stop_request", "ReleaseRequest": "release_request"}
#: RPC -> the envelope's call and the reply's result.
QUESTIONS = {
    "GetAsEngineStat": ("get_engine_stat", "engine_stat"),
    "GetModelInformation": ("get_model_information", "model_information"),
    "GetOpProfilingInfo": ("get_op_profiling_info", "op_profiling_info"),
    "GetFileInformation": ("get_file_information", "file_information"),
    "GetRankNums": ("get_rank_nums", "rank_nums"),
}


class FleetCalls:
    """The broker's part of the service, for the callers of one listener."""

    def __init__(
        self,
        broker: BrokerClient,
        ledger: Ledger,
        denials: Denials,
        settings: GatewaySettings,
        tenant: str,
        *,
        may_shutdown: bool,
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._denials = denials
        self._max_uuid_bytes = settings.max_uuid_bytes
        self._timeout_s = settings.call_timeout_s
        self._model_timeout_s = settings.model_timeout_s
        self._tenant = tenant
        self._may_shutdown = may_shutdown

    def handlers(self) -> dict[str, Handler]:
        """Handlers by RPC. They raise FleetError with the broker's status and reason."""
        table: dict[str, Handler] = {"StartRequest": self.start_request}
        table |= {rpc: self._model_handler(call) for rpc, call in MODEL_CALLS.items()}
        table |= {rpc: self._request_handler(call) for rpc, call in REQUEST_CALLS.items()}
        table |= {rpc: self._question_handler(*names) for rpc, names in QUESTIONS.items()}
        return table

    async def start_request(
        self, request: pb.StartRequestRequest, context: Context
    ) -> pb.StartRequestResponse:
        """Submits a request. A missing uuid is made here, so that a resend of the envelope stays the same."""
        is_new = not request.config.uuid
        if is_new:
            request.config.uuid = uuid_lib.uuid4().hex
        deadline_ms = answers.number_of(context, metadata.DEADLINE_MS, 1, MAX_DEADLINE_MS)
        priority = answers.number_of(context, metadata.PRIORITY, -100, 100)
        await self._unless_full(request, priority or 0, is_new=is_new)
        envelope = fleet.Envelope(
            tenant=self._tenant,
            denied_before=self._denials.take_count(),
            start_request=request,
            deadline_unix_ms=0 if deadline_ms is None else now_ms() + deadline_ms,
            priority=priority or 0,
        )
        reply = await self._broker.call(envelope, self._timeout_s)
        self._denials.note(envelope, reply)
        self._checked(reply, context)
        return pb.StartRequestResponse(uuid=reply.uuid or request.config.uuid)

    async def _unless_full(self, request: pb.StartRequestRequest, priority: int, *, is_new: bool) -> None:
        """Denies what the broker would deny now; one that was accepted before must get its answer again."""
        denial = self._denials.denial(self._tenant, request.model_name, priority)
        if denial is None:
            return
        rid = keys.request_id(self._tenant, request.config.uuid)
        is_long = len(request.config.uuid.encode()) > self._max_uuid_bytes  # never accepted, and no key
        if is_new or is_long or await self._ledger.model_of(rid) is None:
            self._denials.count()
            raise denial

    def _model_handler(self, call: str) -> Handler:
        async def handle(request: Message, context: Context) -> pb.AsStatus:
            envelope = self._envelope(call, request)
            envelope.may_shutdown = self._may_shutdown
            if call == "build_model":
                envelope.tenant = self._owner(context)
            await self._call(envelope, self._model_timeout_s, context)
            return pb.AsStatus()

        return handle

    def _owner(self, context: Context) -> str:
        """Whose the model will be."""
        owner = answers.of_request(context, metadata.OWNER)
        if owner not in (None, metadata.OPERATOR):
            raise ParamError(f"metadata {metadata.OWNER} is {owner[:40]!r}; its only value is operator")
        return owner or self._tenant

    def _request_handler(self, call: str) -> Handler:
        async def handle(request: pb.StopRequestRequest, context: Context) -> pb.StartRequestResponse:
            reply = await self._call(self._envelope(call, request), self._timeout_s, context)
            self._denials.made_room(self._tenant, request.model_name)
            return pb.StartRequestResponse(uuid=reply.uuid or request.uuid)

        return handle

    def _question_handler(self, call: str, result: str) -> Handler:
        async def handle(request: Message, context: Context) -> Message:
            reply = await self._call(self._envelope(call, request), self._timeout_s, context)
            answer: Message = getattr(reply, result)
            return answer

        return handle

    def _envelope(self, call: str, request: Message) -> fleet.Envelope:
        envelope = fleet.Envelope(tenant=self._tenant)
        field: Message = getattr(envelope, call)
        field.CopyFrom(request)
        field.SetInParent()  # an empty message would otherwise leave the call unset
        return envelope

    async def _call(self, envelope: fleet.Envelope, timeout_s: float, context: Context) -> fleet.Reply:
        return self._checked(await self._broker.call(envelope, timeout_s), context)

    def _checked(self, reply: fleet.Reply, context: Context) -> fleet.Reply:
        raise_for(reply)
        if reply.reason:
            context.set_trailing_metadata(((metadata.REASON, answers.reason_text(reply.reason)),))
        return reply
