"""The 22 methods of a listener: one table, one border where failures become answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from allspark_bus import wire_shape
from allspark_bus.errors import BrokerUnavailable, FleetError, MalformedMessage, StoreUnavailable
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata
from allspark_proto.version import VERSION, version_full
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from redis.exceptions import RedisError

from allspark_gateway import answers, results
from allspark_gateway.answers import Context
from allspark_gateway.calls import FleetCalls, Handler
from allspark_gateway.deliveries import Delivery
from allspark_gateway.results import Results
from allspark_gateway.sync import Sync

log = logging.getLogger(__name__)

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["AllSpark"]

#: RPC -> what a failed call answers where an empty message would say something else.
FAILED: dict[str, Callable[[Any], Message]] = {
    "Get": results.nothing,
    "GetNoWait": results.nothing,
    "GenerateStatus": results.interrupted,
    "GetAsEngineStat": lambda request: pb.AsEngineStat(model_name=request.model_name),
    "GetFileInformation": lambda _: pb.FileInformationResponse(current_version_engine=VERSION),
}


class GatewayLeaves(FleetError):
    """This gateway shuts down; another one answers the same uuid."""


class InFlight:
    """Counts calls in progress."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A call began."""
        self._num_calls += 1
        if self._num_calls == 1:
            self._idle.clear()

    def exit(self) -> None:
        """A call ended."""
        self._num_calls -= 1
        if self._num_calls == 0:
            self._idle.set()

    async def is_idle_within(self, seconds: float) -> bool:
        """Whether no call is in progress at some moment within the time."""
        if self._num_calls == 0:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


async def _get_version_full(_: pb.Empty, __: Context) -> pb.VersionInfo:
    return pb.VersionInfo(version_info=version_full())


async def _get_rank_id(_: pb.Empty, __: Context) -> pb.RankId:
    return pb.RankId(rank_id=0)


class Service(grpc.GenericRpcHandler):
    """The service of one listener as grpc.aio takes it; message types come from the descriptor.

    Not the generated registration: with it grpc.aio waits on one future for each method at every call.
    """

    def __init__(self, calls: FleetCalls, read: Results, sync: Sync, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        table = calls.handlers() | {
            "GetVersionFull": _get_version_full,
            "GetRankId": _get_rank_id,
            "SyncRequest": sync.sync_request,
            "GenerateStatus": read.generate_status,
            "GeneratedLength": read.generated_length,
            "Get": read.get_from,
            "GetNoWait": read.get_no_wait_from,
        }
        self._methods = {_path(m.name): self._plain(m, table[m.name]) for m in DESCRIPTOR.methods}
        delivering: dict[str, Handler] = {"Get": read.get, "GetNoWait": read.get_no_wait}
        self._delivering = {
            _path(name): self._with_fate(DESCRIPTOR.methods_by_name[name], handler)
            for name, handler in delivering.items()
        }

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a call: Get and GetNoWait without their own cursor are those whose fate matters."""
        if call.method in self._delivering and all(k != metadata.CURSOR for k, _ in call.invocation_metadata):
            return self._delivering[call.method]
        return self._methods.get(call.method)

    def _plain(self, method: MethodDescriptor, handler: Handler) -> "grpc.RpcMethodHandler[Any, Any]":
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        return grpc.unary_unary_rpc_method_handler(
            self._border(method, handler),
            request_deserializer=_reader(request),
            response_serializer=response.SerializeToString,
        )

    def _with_fate(self, method: MethodDescriptor, handler: Handler) -> "grpc.RpcMethodHandler[Any, Any]":
        """The same on the wire, but the message is written here, so that a failure to write is seen here."""
        border = self._border(method, handler)

        async def handle(request: Any, context: Context) -> None:
            answer = await border(request, context)
            if not isinstance(answer, Delivery):
                await context.write(answer)
                return
            try:
                await context.write(answer.response)
            except BaseException:
                answer.lost()
                raise
            answer.arrived()

        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        return grpc.unary_stream_rpc_method_handler(
            handle,
            request_deserializer=_reader(request),
            response_serializer=response.SerializeToString,
        )

    def _border(self, method: MethodDescriptor, handler: Handler) -> Callable[[Any, Context], Awaitable[Any]]:
        """Business errors are answers, outages are UNAVAILABLE, anything else is logged and never escapes."""
        name, in_flight, response = method.name, self._in_flight, GetMessageClass(method.output_type)
        failed = FAILED.get(name, lambda _: response())

        async def handle(request: Any, context: Context) -> Any:
            if isinstance(request, MalformedMessage):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.reason)
            in_flight.enter()
            try:
                if isinstance(request, FleetError):
                    raise request
                return await handler(request, context)
            except (StoreUnavailable, BrokerUnavailable, GatewayLeaves) as e:
                await context.abort(grpc.StatusCode.UNAVAILABLE, e.reason, answers.of_error(e))
            except RedisError as e:
                log.error("%s of %r: Redis refused a command: %s", name, answers.uuid_of(request), e)
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"Redis refused a command: {e}")
            except FleetError as e:
                return _failure(failed(request), request, context, e)
            except Exception as e:
                log.exception("%s of %r failed", name, answers.uuid_of(request))
                error = FleetError(f"internal error of the gateway: {e!r}")
                answer = _failure(failed(request), request, context, error)
                if isinstance(answer, pb.AsStatus | pb.StartRequestResponse):
                    return answer
                await context.abort(grpc.StatusCode.INTERNAL, error.reason, answers.of_error(error))
            finally:
                in_flight.exit()

        return handle


def _reader(kind: type[Message]) -> Callable[[bytes], Message | FleetError]:
    """Reads a message of this type, or says why not: gRPC would log every error that is raised here."""

    def read(message: bytes) -> Message | FleetError:
        try:
            if kind is pb.StartRequestRequest:
                wire_shape.check_request(message)
            return kind.FromString(message)
        except DecodeError as e:
            return MalformedMessage(f"the message is no {kind.DESCRIPTOR.name}: {e}")
        except FleetError as e:
            return e

    return read


def _path(name: str) -> str:
    return f"/{DESCRIPTOR.full_name}/{name}"


def _failure(response: Message, request: Message, context: Context, error: FleetError) -> Message:
    answers.fill_status(response, request, error)
    context.set_trailing_metadata(answers.of_error(error))
    return response
