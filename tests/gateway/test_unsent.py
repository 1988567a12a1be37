"""Large answers that nobody takes: their bytes are bounded, and who reads is served all the same."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from allspark_bus import tensors
from allspark_gateway.main import Gateway
from allspark_gateway.unsent import READS_AT_ONCE, NoRoom, Unsent
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from .conftest import EOS, Gateways, Producer

MIB = 1 << 20
BOUND = 8 * MIB
ASKED = 60
TENSOR = tensors.from_array("logits", np.zeros((4, MIB // 16), "<f4")).SerializeToString()
"""A result of 1 MiB."""

GREEDY = """
import asyncio, os, signal, sys
import grpc.aio
from allspark_proto import allspark_service_pb2 as pb, metadata
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

async def main(address, asked):
    options = [("grpc.max_receive_message_length", -1)]
    stub = AllSparkStub(grpc.aio.insecure_channel(address, options=options))
    cursor = ((metadata.CURSOR, "0"),)
    calls = [stub.Get(pb.UUID(uuid="large"), metadata=cursor, timeout=300) for _ in range(asked)]
    calls += [stub.Get(pb.UUID(uuid=f"own{n}"), timeout=300) for n in range(asked)]
    await stub.GeneratedLength(pb.UUID(uuid="large"))
    os.kill(os.getpid(), signal.SIGSTOP)
    print(len([await call for call in calls]))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def start(gateway: Gateway) -> "subprocess.Popen[str]":
    """A client that has asked for everything and has stopped."""
    command = [sys.executable, "-c", GREEDY, gateway.listeners[0].bound, str(ASKED)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    greedy = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    _, status = os.waitpid(greedy.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return greedy


async def until_full(unsent: Unsent) -> None:
    async with asyncio.timeout(30):
        while unsent.num_bytes < BOUND:
            await asyncio.sleep(0.01)


REQUESTS = ["large", *[f"own{n}" for n in range(ASKED)]]


async def admit(producer: Producer) -> None:
    for uuid in REQUESTS:
        await producer.admit(uuid)


async def end(producer: Producer) -> None:
    """All those who wait have something to take."""
    for uuid in REQUESTS:
        await producer.add(uuid, 0, 5, ending=EOS, tensors={"logits": TENSOR})


async def test_a_client_that_takes_nothing_holds_a_bounded_number_of_bytes(
    gateways: Gateways, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for 120 MiB and stops. When it goes on it gets all of it, each answer from the beginning."""
    gateway = await gateways.open()
    unsent = gateway._unsent
    monkeypatch.setattr(unsent, "_bound", BOUND)
    await admit(producer)
    client = gateways.client(gateway)
    greedy = await asyncio.to_thread(start, gateway)
    try:
        await end(producer)
        await until_full(unsent)
        for _ in range(5):
            reply, _ = await client.call("GetNoWait", pb.UUID(uuid="large"), [(metadata.CURSOR, "0")])
            assert list(reply.ids_from_generate) == [5]
        highest = unsent.num_bytes
        assert highest <= BOUND + 2 * READS_AT_ONCE * MIB * 1.1, (
            "and not the hundreds of MiB that were asked for"
        )
        greedy.send_signal(signal.SIGCONT)
        output, _ = await asyncio.to_thread(greedy.communicate, timeout=60)
        assert int(output) == 2 * ASKED
    finally:
        greedy.kill()
        greedy.wait()
    async with asyncio.timeout(20):
        while unsent.num_bytes:
            await asyncio.sleep(0.01)
    assert not unsent._of and not unsent._waiting and not unsent._reading


async def test_a_client_that_goes_away_leaves_nothing(
    gateways: Gateways, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await gateways.open()
    unsent = gateway._unsent
    monkeypatch.setattr(unsent, "_bound", BOUND)
    await admit(producer)
    greedy = await asyncio.to_thread(start, gateway)
    await end(producer)
    await until_full(unsent)
    greedy.kill()
    greedy.wait()
    async with asyncio.timeout(20):
        while unsent.num_bytes or unsent._of or unsent._waiting:
            await asyncio.sleep(0.01)
    assert await gateway._in_flight.is_idle_within(20)
    client = gateways.client(gateway)
    for n in range(ASKED):
        uuid = f"own{n}"
        reply, _ = await client.call("Get", pb.UUID(uuid=uuid), timeout_s=20)
        assert list(reply.ids_from_generate) in ([5], []), "what it had taken and read is gone"


@pytest.mark.parametrize("seed", range(5))
async def test_whoever_waits_is_served_whatever_the_others_do(seed: int) -> None:
    """Callers look, find something or nothing, send slowly or give up; all get through, within the bound."""
    rng = random.Random(seed)
    bound, largest = 100, 30
    unsent, reading, done = Unsent(bound), Counter[str](), Counter[str]()
    highest = 0

    async def call(number: int) -> None:
        nonlocal highest
        peer, rid = f"peer{number % 5}", f"t/{number % 3}"
        while True:
            await unsent.room(peer)
            try:
                size = await unsent.look(peer, rid, lambda: find(rid))
            except NoRoom:
                continue
            if size:
                break
        gone = unsent.count(peer, size)
        highest = max(highest, unsent.num_bytes)
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
        finally:
            gone()
        done[peer] += 1

    async def find(rid: str) -> int:
        reading[rid] += 1
        try:
            assert reading[rid] <= READS_AT_ONCE
            await asyncio.sleep(rng.choice([0, 0.0005]))
        finally:
            reading[rid] -= 1
        return rng.choice([0, rng.randint(1, largest)])

    async with asyncio.timeout(30):
        calls = [asyncio.create_task(call(n)) for n in range(300)]
        for task in rng.sample(calls, 30):
            await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)] == []
    assert done.total() >= 270, f"seed {seed}"
    assert unsent.num_bytes == 0 and not unsent._of and not unsent._waiting and not unsent._reading
    assert highest <= bound + 3 * READS_AT_ONCE * largest


async def test_a_connection_that_takes_nothing_keeps_nobody_else_from_reading() -> None:
    unsent = Unsent(10)
    frozen = [unsent.count("frozen", 8), unsent.count("frozen", 8)]
    await asyncio.wait_for(unsent.room("reads"), 20)
    blocked = asyncio.create_task(unsent.room("frozen"))
    for _ in range(3):
        gone = unsent.count("reads", 5)
        gone()
        await asyncio.wait_for(unsent.room("reads"), 20)
    assert not blocked.done()
    frozen.pop()()
    await asyncio.wait_for(blocked, 20)
    frozen.pop()()
    assert unsent.num_bytes == 0
