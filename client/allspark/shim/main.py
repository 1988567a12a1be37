"""The process that DashInfer's client starts: sockets for its ranks, one session, gone with the client.

`python -c … DIR ARGV-OF-MPIRUN`. It has to listen within eight seconds, so it imports little.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from allspark_proto import allspark_service_pb2 as pb
from google.protobuf.message import Message

from allspark.client import AllSparkError, AsyncClient
from allspark.client.calls import MAX_MESSAGE_BYTES
from allspark.shim.arguments import Launch, parse
from allspark.shim.session import Answer, Handlers, Refused, Session
from allspark.shim.settings import ShimError, ShimSettings

SERVICE = pb.DESCRIPTOR.services_by_name["AllSpark"]
LAST_ANSWERS_S = 0.2
RELEASE_LIMIT_S = 20.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
Context = grpc.aio.ServicerContext[Any, Any]


class Methods(grpc.GenericRpcHandler):
    """The service of one rank."""

    def __init__(self, handlers: Handlers) -> None:
        self._methods = {
            f"/{SERVICE.full_name}/{name}": grpc.unary_unary_rpc_method_handler(
                _border(name, handle),
                request_deserializer=kind.FromString,
                response_serializer=_serialize,
            )
            for name, (kind, handle) in handlers.items()
        }

    def service(self, call: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a call."""
        return self._methods.get(call.method)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _border(name: str, handle: Callable[[Any], Answer]) -> Callable[[Any, Context], Answer]:
    """Refusals are statuses, with the reason on the client's standard error; without a fleet UNAVAILABLE."""

    async def answer(request: Any, context: Context) -> Any:
        uuid = request.config.uuid if name == "StartRequest" else getattr(request, "uuid", "")
        try:
            return await handle(request)
        except Refused as refused:
            _say(f"{name}: {refused}")
            if name.endswith("Request"):
                return pb.StartRequestResponse(as_status=refused.status, uuid=uuid)
            return pb.AsStatus(as_status=refused.status)
        except AllSparkError as error:
            _say(f"{name}: {error}")
            return await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    return answer


def follower(rank: int) -> Handlers:
    """A rank other than 0: the client tells it everything and asks it nothing."""

    async def done(_: object) -> pb.AsStatus:
        return pb.AsStatus()

    async def echo(call: pb.StopRequestRequest) -> pb.StartRequestResponse:
        return pb.StartRequestResponse(uuid=call.uuid)

    async def started(call: pb.StartRequestRequest) -> pb.StartRequestResponse:
        return pb.StartRequestResponse(uuid=call.config.uuid)

    async def rank_id(_: pb.Empty) -> pb.RankId:
        return pb.RankId(rank_id=rank)

    model_calls = ("BuildModelFromConfigStruct", "StartModel", "StopModel", "ReleaseModel", "ShutdownService")
    ends = ("StopRequest", "ReleaseRequest", "SyncRequest")
    handlers: dict[str, tuple[type[Any], Callable[[Any], Answer]]] = dict.fromkeys(
        model_calls, (pb.Empty, done)
    )
    handlers |= dict.fromkeys(ends, (pb.StopRequestRequest, echo))
    return handlers | {"StartRequest": (pb.StartRequestRequest, started), "GetRankId": (pb.Empty, rank_id)}


async def serve(settings: ShimSettings, launch: Launch) -> None:
    """Serves until the client says goodbye or is gone, then releases what it left."""
    over = asyncio.Event()
    with _watch(launch.client_pid, over):
        async with AsyncClient(settings.grpc, access=settings.access()) as client:
            session = Session(client, settings, len(launch.ranks))
            listeners = []
            for rank, path in launch.sockets().items():
                handlers = session.handlers() if rank == 0 else follower(rank)
                listeners.append(await Listener.open(path, Methods(handlers)))
            await _either(over, session.over)
            await asyncio.gather(*[listener.close() for listener in listeners])
            try:
                await asyncio.wait_for(session.release_all(), RELEASE_LIMIT_S)
            except TimeoutError:
                _say("the fleet does not answer: what this program left there expires by itself")


class Listener:
    """The socket of one rank, and its server."""

    def __init__(self, path: Path, server: grpc.aio.Server) -> None:
        self._path = path
        self._server = server
        self._inode = path.stat().st_ino

    @classmethod
    async def open(cls, path: str, methods: Methods) -> "Listener":
        """Takes the path over from an earlier shim of the same client. Raises ShimError."""
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((methods,))
        _bind(server, Path(path))
        await server.start()
        return cls(Path(path), server)

    async def close(self) -> None:
        """Lets calls in progress answer for a moment; the path goes at once, unless a successor has it."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        await self._server.stop(LAST_ANSWERS_S)


def _bind(server: grpc.aio.Server, path: Path) -> None:
    mask = os.umask(0o177)  # the socket must never be open to others
    try:
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        raise ShimError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(mask)


@contextlib.contextmanager
def _watch(pid: int, over: asyncio.Event) -> Any:
    """Sets the event when the process ends, whatever way, and on SIGTERM."""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, over.set)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        over.set()
        yield
        return
    loop.add_reader(descriptor, over.set)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _say(text: str) -> None:
    """For the client's standard error: its standard output is not ours."""
    sys.stderr.write(f"allspark dashinfer-shim: {text}\n")
    sys.stderr.flush()


def main(argv: Sequence[str]) -> int:
    """DIR, then the arguments of mpirun; 0 when the client has gone."""
    try:
        settings = ShimSettings.read(Path(argv[0]))
        asyncio.run(serve(settings, parse(argv[1:])))
    except ShimError as error:
        _say(str(error))
        return 1
    return 0
