"""A client that asks and does not read: others are served, and nothing of it stays once it is gone."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from allspark_gateway import readers
from allspark_gateway.main import Gateway

from .conftest import EOS, Gateways, Producer

PARKED, ASKED = 100, 300
TENSOR = b"x" * 65_536
"""What each of the answers carries that nobody reads."""

FROZEN = """
import asyncio, os, signal, sys
import grpc.aio
from allspark_proto import allspark_service_pb2 as pb, metadata
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

async def main(address, parked, asked):
    stub = AllSparkStub(grpc.aio.insecure_channel(address))
    waiting = [stub.Get(pb.UUID(uuid="open"), timeout=300) for _ in range(parked)]
    cursor = ((metadata.CURSOR, "0"),)
    calls = [stub.GetNoWait(pb.UUID(uuid="done"), metadata=cursor, timeout=300) for _ in range(asked)]
    await calls[0]
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.fixture
async def gateway(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(readers, "LINGER_S", 0.1)
    yield await gateways.open()


def start(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


async def test_a_client_that_stopped_reading_disturbs_nobody_and_leaves_nothing(
    gateways: Gateways, gateway: Gateway, producer: Producer
) -> None:
    await producer.admit("open")
    await producer.admit("done")
    await producer.add("done", 0, *range(1, 100))
    await producer.add("done", 99, ending=EOS, tensors={"logits": TENSOR})
    client, address = gateways.client(gateway), gateway.listeners[0].bound
    command = [sys.executable, "-c", FROZEN, address, str(PARKED), str(ASKED)]
    frozen = await asyncio.to_thread(start, command)
    try:
        _, status = await asyncio.to_thread(os.waitpid, frozen.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        for _ in range(20):
            assert await client.take("done") in (list(range(1, 100)), [])
            assert await client.length("done") == 99
        assert len(gateway._readers) <= 2, "one for each request, however many ask for it"
    finally:
        frozen.send_signal(signal.SIGKILL)
        frozen.wait()
    assert await gateway._in_flight.is_idle_within(60)
    async with asyncio.timeout(60):
        while len(gateway._readers):
            await asyncio.sleep(0.01)  # until the sweep of idle readers
    await producer.add("open", 0, 7)
    assert await client.get("open") == [7], "its parked Gets took nothing with them"
