"""Anything sent to the open sockets of a real fleet, while somebody else's request goes on unharmed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
import zmq
import zmq.asyncio
from allspark_bus import sockets
from allspark_gateway.calls import MODEL_CALLS
from allspark_gateway.service import DESCRIPTOR
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import metadata
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.fleet_bench import Bench, open_bench
from tests.fuzz.fuzzing import damaged_bytes, fuzz
from tests.fuzz.messages import fill, request

Frames = list[bytes]


@pytest.fixture(scope="module")
def bench(valkey_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if valkey_server.process is None:
        valkey_server.start()
    models = tmp_path_factory.mktemp("models")
    for name in ("list", "pipe", "large"):
        (models / name).mkdir()
    (models / "list" / "config.json").write_text("[]")
    os.mkfifo(models / "pipe" / "config.json")
    with (models / "large" / "config.json").open("wb") as file:
        file.truncate(20 << 30)
    with open_bench(valkey_server.url, models) as made:
        yield made


# ---- ZeroMQ --------------------------------------------------------------------------------------


@st.composite
def filled(draw: st.DrawFn, kind: type[Message], unwanted: tuple[str, ...] = ()) -> bytes:
    """A message with one of its variants set, most fields of it too; sometimes damaged."""
    made = kind(version=1)
    fields = [f for f in kind.DESCRIPTOR.oneofs[0].fields if f.name not in unwanted]
    variant = getattr(made, draw(st.sampled_from(fields)).name)
    variant.SetInParent()
    fill(draw, variant, draw(st.sampled_from([2, 4])))
    for name in ("worker_id", "correlation_id", "tenant"):
        if name in kind.DESCRIPTOR.fields_by_name and draw(st.booleans()):
            setattr(made, name, draw(st.sampled_from(["", "x", "default", "nobody", "\0", "x" * 3000])))
    data = made.SerializeToString()
    return draw(damaged_bytes(data)) if data and draw(st.integers(0, 3)) == 0 else data


def messages(payloads: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[Frames]]:
    heads = [b"", sockets.HEADER, sockets.MAGIC, b"ALSP\x02", bytes(300), b"\xff"]
    odd = st.lists(st.sampled_from(heads) | st.binary(max_size=9) | payloads, min_size=1, max_size=5)
    well_framed = payloads.map(lambda payload: [sockets.HEADER, payload])
    return st.lists(odd | well_framed | well_framed.map(lambda frames: [b"", *frames]), max_size=8)


identities = st.sampled_from([b"", b"x", b"worker", b"\xff\xfe", b"i" * 255])


async def throw(endpoint: str, identity: bytes, thrown: list[Frames]) -> None:
    """Sends messages, and waits until the peer has taken them all: it answers what comes after them."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        if identity:
            dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(endpoint)
        for frames in thrown:
            await dealer.send_multipart(frames)


@fuzz(6)
@given(
    identity=identities,
    thrown=messages(filled(fleet.Envelope, ("shutdown_service", "build_model"))),
)
@example(identity=b"x", thrown=[[b""], [b"", b""], [b"x"] * 50, [sockets.HEADER], [sockets.HEADER, b"\xff"]])
def test_frames_at_the_door_of_clients(identity: bytes, thrown: list[Frames], bench: Bench) -> None:
    async def run() -> None:
        await throw(bench.fleet.frontend, identity, thrown)
        await bench.behave()

    bench.run(run())


@fuzz(3)
@given(identity=identities, thrown=messages(filled(fleet.FromWorker)))
@example(
    identity=b"liar",
    thrown=[
        [
            sockets.HEADER,
            fleet.FromWorker(
                version=1,
                worker_id="liar",
                announce=fleet.Announce(
                    device="cpu", models=[fleet.WorkerModel(name="m", state="running", capacity=99)]
                ),
            ).SerializeToString(),
        ]
    ],
)
def test_frames_at_the_door_of_workers(identity: bytes, thrown: list[Frames], bench: Bench) -> None:
    async def run() -> None:
        well_behaved = asyncio.create_task(bench.behave(100))
        await throw(bench.fleet.backend, identity, thrown)
        await well_behaved
        await bench.behave()

    bench.run(run())


@asynccontextmanager
async def second_broker(bench: Bench) -> AsyncIterator[tuple[zmq.asyncio.Socket, bytes]]:
    """A ROUTER that a worker of its own connects to beside the real broker, and that worker's identity."""
    context = zmq.asyncio.Context()
    router, endpoint = sockets.router(context, "tcp://127.0.0.1:0")
    try:
        bench.fleet.start_worker(f"--broker={endpoint}")
        identity = (await asyncio.wait_for(router.recv_multipart(), 30))[0]
        yield router, identity
    finally:
        bench.fleet.workers.pop().kill()
        context.destroy(linger=0)


def test_frames_at_the_link_of_a_worker(bench: Bench) -> None:
    """A worker that listens to a broker gone mad serves the other one on."""
    found: list[list[Frames]] = []

    @fuzz(6)
    @given(thrown=messages(filled(fleet.ToWorker, ("drain",))))
    def collect(thrown: list[Frames]) -> None:
        found.append(thrown)

    collect()

    async def run() -> None:
        async with second_broker(bench) as (router, identity):
            for thrown in found:
                well_behaved = asyncio.create_task(bench.behave())
                for frames in thrown:
                    await router.send_multipart([identity, *frames])
                await well_behaved
            question = fleet.ControlCall(correlation_id="last", get_engine_stat=pb.ModelName(model_name="m"))
            last = fleet.ToWorker(version=1, control=question).SerializeToString()
            await router.send_multipart([identity, sockets.HEADER, last])
            while True:
                payload = (await asyncio.wait_for(router.recv_multipart(), 30))[-1]
                if fleet.FromWorker.FromString(payload).control_reply.correlation_id == "last":
                    return

    bench.run(run())


@fuzz(4)
@given(
    data=st.lists(
        st.binary(max_size=60) | st.sampled_from([b"\xff" + bytes(8) + b"\x7f", bytes(70_000)]), max_size=4
    )
)
@example(data=[b"GET / HTTP/1.1\r\n\r\n"])
@example(data=[b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00\xff\xff\x01\x05\x00\x00\x00\x01" + bytes(65_535)])
@example(data=[b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48), b"\x04\xff" * 40])
def test_bytes_at_every_port(data: list[bytes], bench: Bench) -> None:
    ports = [bench.fleet.frontend, bench.fleet.backend, "tcp://" + bench.gateway.listeners[0].bound]

    def run(endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 20) as peer:
            for part in data:
                peer.sendall(part)
            peer.shutdown(socket.SHUT_WR)

    async def all_ports() -> None:
        await asyncio.gather(*[asyncio.to_thread(run, endpoint) for endpoint in ports])
        await bench.behave()

    bench.run(all_ports())


# ---- gRPC ----------------------------------------------------------------------------------------

METHODS = sorted(DESCRIPTOR.methods_by_name)
#: What a call may end with; INTERNAL and UNKNOWN would be an error of ours that nobody expected.
CODES = {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


async def call(bench: Bench, method: str, message: Message, pairs: list[tuple[str, str]]) -> None:
    """As a tenant of its own, so that what belongs to others must survive whatever the call does."""
    output = GetMessageClass(DESCRIPTOR.methods_by_name[method].output_type)
    async with grpc.aio.insecure_channel(bench.gateway.listeners[1].address) as channel:
        ask: Any = channel.unary_unary(
            f"/{DESCRIPTOR.full_name}/{method}", type(message).SerializeToString, output.FromString
        )
        waits = method in ("Get", "SyncRequest")
        made = ask(message, metadata=pairs, timeout=0.3 if waits else 60)
        code = await made.code()
        told = [str(v) for k, v in await made.trailing_metadata() or () if k == metadata.REASON]
        assert code in (CODES if waits else CODES - {grpc.StatusCode.DEADLINE_EXCEEDED}), await made.details()
        assert not any("internal" in text for text in told), told


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Message]:
    method = DESCRIPTOR.methods_by_name[draw(st.sampled_from(METHODS))]
    message = GetMessageClass(method.input_type)()
    if method.name == "StartRequest":
        message = request()
        message.config.max_length = 8
    fill(draw, message, draw(st.sampled_from([2, 6])))
    if "model_name" in message.DESCRIPTOR.fields_by_name and draw(st.booleans()):
        message.model_name = "m" if method.name in ("StartRequest", "Get", "SyncRequest") else "x"
    return method.name, message


PAIRS = [
    (metadata.CURSOR, "3"),
    (metadata.CURSOR, "-1"),
    (metadata.DEADLINE_MS, "9" * 30),
    (metadata.PRIORITY, "7"),
    (metadata.OWNER, "operator"),
    (metadata.OWNER, "x" * 500),
]


@fuzz(40)
@given(asked=calls(), pairs=st.lists(st.sampled_from(PAIRS), max_size=2))
@example(asked=("GetFileInformation", pb.FileInformationRequest(model_path="[" * 5000)), pairs=[])
@example(asked=("GetFileInformation", pb.FileInformationRequest(model_path="list")), pairs=[])
@example(asked=("GetFileInformation", pb.FileInformationRequest(model_path="pipe")), pairs=[])
@example(asked=("GetFileInformation", pb.FileInformationRequest(model_path="large")), pairs=[])
def test_any_message_to_any_method(
    asked: tuple[str, Message], pairs: list[tuple[str, str]], bench: Bench
) -> None:
    bench.run(call(bench, *asked, pairs))


def test_others_were_not_touched_by_any_of_it(bench: Bench) -> None:
    bench.run(bench.behave())


@fuzz(10)
@given(
    method=st.sampled_from([*sorted(set(METHODS) - set(MODEL_CALLS)), "", "NoMethod", "../x"]),
    data=damaged_bytes(request().SerializeToString()) | st.binary(max_size=30) | st.just(b"\x0b" * 100_000),
)
@example(method="StartRequest", data=b"\xff" * 9)
def test_bytes_that_are_no_message(method: str, data: bytes, bench: Bench) -> None:
    """gRPC's own errors; the next call is answered as ever. Not for models: bytes may happen to name ours."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(bench.gateway.listeners[1].address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/{DESCRIPTOR.full_name}/{method}")(data, timeout=2)
        version = await bench.stub.GetVersionFull(pb.Empty(), timeout=60)
        assert version.version_info

    bench.run(run())


@pytest.mark.parametrize(
    "pairs",
    [[("x", "y" * 1_000_000)], [(f"key-{i}", "v" * 50) for i in range(5000)], [("a-bin", b"\0" * 100_000)]],
    ids=["one value", "many", "binary"],
)
def test_giant_metadata_are_refused(pairs: list[tuple[str, str]], bench: Bench) -> None:
    async def run() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.stub.GetVersionFull(pb.Empty(), metadata=pairs, timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await bench.behave(3)

    bench.run(run())
