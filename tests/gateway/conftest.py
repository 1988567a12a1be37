"""A gateway between real sockets: Valkey, gRPC, and a broker that is a script on a real ROUTER."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
import zmq
import zmq.asyncio
from allspark_bus import keys, sockets
from allspark_bus.errors import MalformedMessage
from allspark_bus.ledger import Append, Ending, Entry, Ledger, Ttl, now_ms
from allspark_bus.store import Store
from allspark_gateway.main import Gateway
from allspark_gateway.settings import GatewaySettings
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub
from google.protobuf.message import DecodeError

LIMIT_S = 60.0  # for anything to happen: a busy machine may not run a process for many seconds
#: What a gateway waits for before it takes something for lost.
PATIENT: dict[str, Any] = {"call_timeout_s": 30, "redelivery_s": 30, "status_deferral_s": 30}
EOS = Ending(pb.GenerateFinished, "eos")
Script = Callable[[fleet.Envelope], fleet.Reply | None]


@pytest.fixture
def valkey(valkey_server: Any) -> Any:
    """One server for all tests of the gateway, emptied for each, started again if a test killed it."""
    if valkey_server.process is None:
        valkey_server.start()
    with socket.create_connection(("127.0.0.1", valkey_server.port), LIMIT_S) as s:
        s.sendall(b"FLUSHALL\r\n")
        assert s.recv(16) == b"+OK\r\n"
    return valkey_server


class ScriptedBroker:
    """Answers each envelope with what the script of its call returns (None: silence)."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket, self.endpoint = sockets.router(self._context, "tcp://127.0.0.1:0")
        self.envelopes: list[fleet.Envelope] = []
        self.scripts: dict[str, Script] = {}
        self.default: Script = lambda _: fleet.Reply()
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            route, body = sockets.split_route(await self._socket.recv_multipart())
            try:
                envelope = fleet.Envelope.FromString(sockets.payload_of(body))
            except (MalformedMessage, DecodeError):
                continue  # a worker of another test that still looks for the broker which had this port
            call = envelope.WhichOneof("call") or ""
            if call != "get_fleet_status":
                self.envelopes.append(envelope)
            reply = self.scripts.get(call, self.default)(envelope)
            if reply is not None:
                reply.correlation_id = envelope.correlation_id
                frames = [*route, sockets.HEADER, reply.SerializeToString()]
                try:
                    await self._socket.send_multipart(frames)
                except zmq.ZMQError as e:
                    if e.errno != zmq.EHOSTUNREACH:  # the gateway of the test is closed already
                        raise

    def answers(self, call: str, **reply: Any) -> None:
        self.scripts[call] = lambda _: fleet.Reply(**reply)

    async def close(self) -> None:
        self._task.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        finally:  # a context that is left to the garbage collector waits for its sockets for ever
            self._context.destroy(linger=0)


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    b = ScriptedBroker()
    yield b
    await b.close()


class Client:
    """The generated stub of one listener; `call` returns the answer and its trailing metadata."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = AllSparkStub(self.channel)

    async def call(
        self, name: str, message: Any, metadata: Sequence[tuple[str, str]] = (), timeout_s: float = LIMIT_S
    ) -> tuple[Any, dict[str, str]]:
        call = getattr(self.stub, name)(message, metadata=tuple(metadata), timeout=timeout_s)
        reply = await call
        return reply, {k: str(v) for k, v in (await call.trailing_metadata() or ())}

    async def get(self, uuid: str, **more: Any) -> list[int]:
        reply, _ = await self.call("Get", pb.UUID(uuid=uuid), **more)
        assert not reply.empty
        return list(reply.ids_from_generate)

    async def take(self, uuid: str) -> list[int]:
        reply, _ = await self.call("GetNoWait", pb.UUID(uuid=uuid))
        return list(reply.ids_from_generate)

    async def status(self, uuid: str) -> int:
        return int((await self.call("GenerateStatus", pb.UUID(uuid=uuid)))[0].status)

    async def length(self, uuid: str) -> int:
        return int((await self.call("GeneratedLength", pb.UUID(uuid=uuid)))[0].len)


class Producer:
    """What broker and worker would write: requests and their tokens, by uuid."""

    def __init__(self, store: Store, ttl: Ttl | None = None) -> None:
        self.ledger = Ledger(store, ttl or Ttl())
        self.store = store

    async def admit(self, uuid: str, tenant: str = "default", model: str = "m") -> None:
        rid = keys.request_id(tenant, uuid)
        admitted = await self.ledger.admit(Entry(rid, model, 1, "w", b"", now_ms(), 0, 0, 0, 0), b"d")
        assert admitted.outcome in ("new", "same"), "the same if the answer was lost and it was sent again"

    async def add(
        self,
        uuid: str,
        position: int,
        *tokens: int,
        ending: Ending | None = None,
        tenant: str = "default",
        **more: Any,
    ) -> None:
        rid = keys.request_id(tenant, uuid)
        [(code, _)] = await self.ledger.append([Append(rid, "m", 1, position, tokens, ending, **more)])
        assert code == 0, f"append at {position} was refused ({code})"

    async def finish(self, uuid: str, ending: Ending, tenant: str = "default") -> None:
        assert (await self.ledger.finish(keys.request_id(tenant, uuid), ending))[0] == "ended"

    async def release(self, uuid: str, tenant: str = "default") -> None:
        assert (await self.ledger.release(keys.request_id(tenant, uuid)))[0] == "ok"

    async def num_subscribed(self, uuid: str, tenant: str = "default") -> int:
        channel = keys.stream(keys.request_id(tenant, uuid))
        return int((await self.store.command("PUBSUB", "NUMSUB", channel))[1])

    async def until_parked(self, uuid: str, gateways: int = 1) -> None:
        """Until that many gateways listen for changes of the request."""
        async with asyncio.timeout(LIMIT_S):
            while await self.num_subscribed(uuid) < gateways:
                await asyncio.sleep(0.001)  # polls Valkey, the other process


@pytest.fixture
def producer(store: Store) -> Producer:
    return Producer(store)


class Gateways:
    """Opens gateways and clients, and closes them after the test."""

    def __init__(self, redis: str, endpoint: str) -> None:
        self._redis = redis
        self._endpoint = endpoint
        self._clients: list[Client] = []
        self._gateways: list[Gateway] = []

    def settings(self, **more: Any) -> GatewaySettings:
        base: dict[str, Any] = {"grpc": ("127.0.0.1:0",), "broker": (self._endpoint,), "redis": self._redis}
        return GatewaySettings(**(base | PATIENT | {"drain_s": 5} | more))

    async def open(self, **more: Any) -> Gateway:
        gateway = Gateway(self.settings(**more))
        self._gateways.append(gateway)
        await gateway.open()
        return gateway

    def client(self, gateway: Gateway, index: int = 0) -> Client:
        return self.client_at(gateway.listeners[index].bound)

    def client_at(self, address: str) -> Client:
        client = Client(address)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.channel.close()
        for gateway in self._gateways:
            await asyncio.wait_for(gateway.close(), LIMIT_S)


@pytest.fixture
async def gateways(valkey: Any, broker: ScriptedBroker) -> AsyncIterator[Gateways]:
    g = Gateways(valkey.url, broker.endpoint)
    yield g
    await g.close()


@pytest.fixture
async def gateway(gateways: Gateways) -> Gateway:
    return await gateways.open()


@pytest.fixture
async def client(gateways: Gateways, gateway: Gateway) -> Client:
    return gateways.client(gateway)
