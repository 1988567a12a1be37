"""Tokens at the door of a listener: which service a caller gets, if any."""

import logging
from collections.abc import Callable

import grpc
import grpc.aio
from allspark_bus.sparse_log import SparseLog
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from allspark_gateway.calls import MODEL_CALLS
from allspark_gateway.tokens import Scope, Token, Tokens, Unauthenticated

log = logging.getLogger(__name__)

_SERVICE = pb.DESCRIPTOR.services_by_name["AllSpark"].full_name
#: RPC -> the scope that it needs. What is not named here (versions, figures) any valid token may ask.
SCOPES: dict[str, Scope] = {
    **dict.fromkeys(MODEL_CALLS, "admin"),
    **dict.fromkeys(("StartRequest", "StopRequest", "ReleaseRequest", "SyncRequest"), "infer"),
    **dict.fromkeys(("GenerateStatus", "GeneratedLength", "Get", "GetNoWait"), "infer"),
}
_SCOPE_OF = {f"/{_SERVICE}/{name}": scope for name, scope in SCOPES.items()}

#: (tenant, whether it may stop the fleet) -> the service of such callers.
MakeService = Callable[[str, bool], grpc.GenericRpcHandler]


class Guard(grpc.GenericRpcHandler):
    """Stands before all services of a listener: every call, health checks too, needs a valid token."""

    def __init__(
        self, tokens: Tokens, make: MakeService, others: grpc.GenericRpcHandler, *, may_shutdown: bool
    ) -> None:
        self._tokens = tokens
        self._make = make
        self._others = others
        self._may_shutdown = may_shutdown
        self._services: dict[tuple[str, bool], grpc.GenericRpcHandler] = {}
        self._refusals = _Refusals()

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[object, object] | None":
        """The handler of a call: of its tenant's service, or one that refuses it unread."""
        try:
            token = self._tokens.authenticate(_authorization(call))
        except Unauthenticated as e:
            return self._refusals.handler(grpc.StatusCode.UNAUTHENTICATED, str(e))
        scope = _SCOPE_OF.get(call.method)
        if scope is not None and scope not in token.scopes:
            reason = f"token {token.name} lacks the scope {scope}, which {call.method} needs"
            return self._refusals.handler(grpc.StatusCode.PERMISSION_DENIED, reason)
        return self._service_of(token).service(call) or self._others.service(call)

    def _service_of(self, token: Token) -> grpc.GenericRpcHandler:
        key = (token.tenant, token.allow_shutdown or self._may_shutdown)
        if key not in self._services:  # bounded by what the token file ever named
            self._services[key] = self._make(*key)
        return self._services[key]


def _authorization(call: grpc.HandlerCallDetails) -> str | None:
    for name, value in call.invocation_metadata or ():
        if name == metadata.AUTHORIZATION:
            return value if isinstance(value, str) else None
    return None


class _Refusals:
    """Handlers that end a call without reading its messages; the log tells about them at a bounded rate."""

    def __init__(self) -> None:
        self._log = SparseLog(log)

    def handler(self, code: grpc.StatusCode, reason: str) -> "grpc.RpcMethodHandler[object, object]":
        async def refuse(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            self._log.warning(f"refused a call from {context.peer()}: {reason}")
            await context.abort(code, reason)

        return grpc.stream_stream_rpc_method_handler(refuse)
