"""A small real fleet, and what a well-behaved client does with it while others do not behave."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
from allspark_bus.store import Store
from allspark_gateway.main import Gateway
from allspark_gateway.settings import GatewaySettings
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

from tests.fleet.harness import MiniFleet, request
from tests.fleet.scripted_engine import expected_tokens
from tests.fuzz.fuzzing import SCALE

PATIENCE_S = 180


class Bench(NamedTuple):
    """A fleet of one broker, one worker and one gateway, and an event loop for them."""

    runner: asyncio.Runner
    fleet: MiniFleet
    gateway: Gateway
    channel: grpc.aio.Channel
    stub: AllSparkStub
    serial: Iterator[int]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.runner.run(asyncio.wait_for(work, PATIENCE_S * max(1.0, SCALE)))

    async def start(self, uuid: str, prompt: list[int], new: int, model: str = "m") -> None:
        """With a uuid that was just released it may be too early."""
        while True:
            call = self.stub.StartRequest(request(uuid, prompt, new, model), timeout=60)
            status = (await call).as_status
            if status != pb.ALLSPARK_REQUEST_DENIED:
                break
            await asyncio.sleep(0.1)  # as the denial asks
        assert status == pb.ALLSPARK_SUCCESS, (uuid, await call.trailing_metadata())

    async def tokens(self, uuid: str) -> list[int]:
        """Everything that Get gives until it gives nothing."""
        found: list[int] = []
        while True:
            answer = await self.stub.Get(pb.UUID(uuid=uuid), timeout=60)
            if not answer.ids_from_generate:
                return found
            found += answer.ids_from_generate

    async def until_over(self, uuid: str) -> int:
        """Until the status is terminal; that of a record which cannot be read counts as well."""
        while True:
            status = (await self.stub.GenerateStatus(pb.UUID(uuid=uuid), timeout=60)).status
            if status in (pb.GenerateFinished, pb.GenerateInterrupted):
                return int(status)
            await asyncio.sleep(0.02)  # polls the gateway: a damaged record tells nobody when it changes

    async def behave(self, new: int = 30) -> None:
        """A request of somebody who does everything right, from its start to its release."""
        number = next(self.serial)
        uuid, prompt = f"well-behaved-{number}", [number + 1, 5]
        await self.start(uuid, prompt, new)
        assert await self.tokens(uuid) == expected_tokens(prompt, new)
        released = await self.stub.ReleaseRequest(pb.StopRequestRequest(uuid=uuid), timeout=60)
        assert released.as_status == pb.ALLSPARK_SUCCESS
        self.check_alive()

    def check_alive(self) -> None:
        for process in [self.fleet.broker, *self.fleet.workers]:
            assert process is not None and process.popen.poll() is None


@contextmanager
def open_bench(redis: str, directory: Path) -> Iterator[Bench]:
    """The server at `redis` is emptied first."""
    with asyncio.Runner() as runner:
        made = runner.run(_open(runner, redis, directory))
        yield made
        runner.run(_close(made))


async def _open(runner: asyncio.Runner, redis: str, directory: Path) -> Bench:
    store = Store(redis)
    await store.command("FLUSHALL")
    await store.close()
    fleet = MiniFleet(redis, directory)
    fleet.write_model(step_s=0.005, max_batch=8)
    fleet.start_worker()
    await fleet.build_and_start()
    addresses = ("127.0.0.1:0", f"unix:{directory}/gateway.sock")  # the second is a tenant of its own
    patient = {"call_timeout_s": 30, "redelivery_s": 30}
    gateway = Gateway(GatewaySettings(grpc=addresses, broker=(fleet.frontend,), redis=redis, **patient))
    await gateway.open()
    channel = grpc.aio.insecure_channel(gateway.listeners[0].bound)
    return Bench(runner, fleet, gateway, channel, AllSparkStub(channel), itertools.count())


async def _close(bench: Bench) -> None:
    await bench.channel.close()
    await bench.gateway.close()
    await bench.fleet.close()
