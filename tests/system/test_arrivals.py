"""Stamps of calls in a gateway that was stopped: what lay in its sockets meanwhile is not taken for new."""

import asyncio
import signal
import sys
from pathlib import Path

import grpc.aio
from allspark.client import AsyncClient, GenerateOptions
from allspark.launcher import Fleet, FleetOptions
from allspark_gateway.arrivals import GRACE_S, STALL_S, Arrivals
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

from tests.fleet.harness import request as start_request
from tests.fleet.scripted_engine import expected_tokens
from tests.system.conftest import SCRIPTED, report


class Clock:
    """A monotonic and a wall clock that go together."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return int(self.now_s * 1000) + 1_000_000


def test_calls_after_a_stall_count_as_sent_before_it_for_a_while() -> None:
    clock = Clock()
    arrivals = Arrivals(clock, clock.wall_ms)
    assert arrivals.sent_ms() == 1_050_000
    clock.now_s += STALL_S
    arrivals.tick()
    assert arrivals.sent_ms() == clock.wall_ms(), "that was no stall"
    before = clock.wall_ms()
    clock.now_s += 60
    assert arrivals.sent_ms() == before
    for _ in range(int(GRACE_S / STALL_S)):
        assert arrivals.sent_ms() == before
        clock.now_s += STALL_S
    assert arrivals.sent_ms() == clock.wall_ms()


def test_a_second_stall_right_after_the_first_reaches_as_far_back() -> None:
    clock = Clock()
    arrivals = Arrivals(clock, clock.wall_ms)
    before = arrivals.sent_ms()
    for _ in range(2):
        clock.now_s += STALL_S + 0.5
        assert arrivals.sent_ms() == before


async def test_a_gateway_that_was_stopped_does_not_run_a_request_that_was_released_elsewhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "m.json").write_text("{}")
    options = FleetOptions(
        gateways=2, model_roots=(tmp_path,), worker_command=(sys.executable, SCRIPTED), start_timeout_s=300.0
    )
    async with Fleet(options, report) as fleet:
        await asyncio.to_thread(fleet.load_model, "m", tmp_path / "m.json")
        stopped, address = fleet.gateways[0], fleet.addresses[0]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = AllSparkStub(channel)
            await stub.GetVersionFull(pb.Empty())  # connected
            stopped.signal(signal.SIGSTOP)
            try:
                copy = stub.StartRequest(start_request("u", [1, 2], 5))
                async with AsyncClient(fleet.addresses[1:]) as client:
                    request = await client.submit("m", [1, 2], GenerateOptions(max_new_tokens=5), "u")
                    assert await request.result() == expected_tokens([1, 2], 5)
                    await request.release()
                await asyncio.sleep(2 * STALL_S)  # at least so long does the fault last
            finally:
                stopped.signal(signal.SIGCONT)
            answer = await copy
            trailing = dict(await copy.trailing_metadata())
        assert answer.as_status == pb.ALLSPARK_REQUEST_DENIED
        assert "was released after this call was sent" in metadata.decode_text(trailing[metadata.REASON])
