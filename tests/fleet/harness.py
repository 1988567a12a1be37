"""Broker and worker processes for tests that speak ZeroMQ and Redis themselves (no gateway)."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from allspark.launcher.ports import free_port
from allspark_bus.broker_client import BrokerClient
from allspark_bus.ledger import Ledger, now_ms
from allspark_bus.store import Store
from allspark_bus.streams import Batch, Streams
from allspark_bus.wakeups import Wakeups
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

SCRIPTED = str(Path(__file__).with_name("scripted_engine.py"))
START_TIMEOUT_S = 120.0
LIMIT_S = 60.0  # for anything to happen: a busy machine may not run a process for many seconds
WORKER_TIMEOUT_S = 8.0  # so no process that lives counts as dead; that one was killed is known at once


class Process:
    """A child that reports its addresses on a pipe."""

    def __init__(self, *command: str) -> None:
        reader, writer = os.pipe()
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.popen = subprocess.Popen([*command, f"--ready-fd={writer}"], pass_fds=[writer], env=env)
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], START_TIMEOUT_S)
        line = os.read(reader, 65536) if ready else b""
        os.close(reader)
        if not line:
            self.kill()
            raise RuntimeError(f"{command} did not become ready")
        self.addresses: dict[str, Any] = json.loads(line)

    def signal(self, signum: int) -> None:
        self.popen.send_signal(signum)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def terminate(self, timeout_s: float = LIMIT_S) -> int:
        """SIGTERM; the exit status."""
        self.popen.send_signal(signal.SIGCONT)
        self.popen.terminate()
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


BROKER = "import sys; from allspark_broker.main import main; from allspark_broker.settings import BrokerSettings as S; sys.exit(main(S.load(sys.argv[1:])))"  # noqa: E501


class MiniFleet:
    """One broker, workers with the scripted engine, and a client."""

    def __init__(
        self, redis: str, directory: Path, *broker_flags: str, worker_timeout_s: float = WORKER_TIMEOUT_S
    ) -> None:
        self.worker_timeout_s = worker_timeout_s
        self.redis = redis
        self.directory = directory
        self.broker_flags = broker_flags
        self.broker: Process | None = None
        self.workers: list[Process] = []
        self.frontend, self.backend = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.start_broker()
        self.store = Store(redis)
        self.ledger = Ledger(self.store)
        self.streams = Streams(self.store)
        self.wakeups = Wakeups(self.store)
        self.client = BrokerClient([self.frontend])

    def start_broker(self) -> None:
        self.broker = Process(
            sys.executable, "-c", BROKER, f"--redis={self.redis}", f"--frontend={self.frontend}",
            f"--backend={self.backend}", "--heartbeat-s=0.1", f"--worker-timeout-s={self.worker_timeout_s}",
            f"--ack-timeout-s={WORKER_TIMEOUT_S}", "--drain-s=5", *self.broker_flags,
        )  # fmt: skip
        self.frontend, self.backend = self.broker.addresses["frontend"], self.broker.addresses["backend"]

    def start_worker(self, *flags: str) -> Process:
        worker = Process(
            sys.executable, SCRIPTED, f"--redis={self.redis}", f"--broker={self.backend}",
            f"--model-root={self.directory}", "--heartbeat-s=0.1", "--broker-timeout-s=3.0",
            "--stall-s=600", *flags,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def write_model(self, name: str = "m.json", **options: object) -> str:
        (self.directory / name).write_text(json.dumps(options))
        return name

    async def call(self, timeout_s: float = LIMIT_S, tenant: str = "", **call: Any) -> fleet.Reply:
        """Sends a call again while the store is out of reach, as the protocol asks clients to."""
        async with asyncio.timeout(timeout_s):
            while (reply := await self.once(timeout_s, tenant, **call)).unavailable:
                await asyncio.sleep(reply.retry_after_ms / 1000)
        return reply

    async def once(self, timeout_s: float = LIMIT_S, tenant: str = "", **call: Any) -> fleet.Reply:
        """The first answer to a call."""
        return await self.client.call(fleet.Envelope(tenant=tenant, **call), timeout_s)

    async def accepted_with_deadline(
        self, started: pb.StartRequestRequest, deadline_ms: int = 500
    ) -> pb.StartRequestRequest:
        """Submits a request with a deadline; with a later one, under another uuid, if it came too late."""
        uuid = started.config.uuid
        while True:
            envelope = fleet.Envelope(start_request=started, deadline_unix_ms=now_ms() + deadline_ms)
            reply = await self.client.call(envelope, LIMIT_S)
            if not reply.as_status:
                return started
            assert reply.as_status == pb.ALLSPARK_REQUEST_DENIED and deadline_ms < 1000 * LIMIT_S, reply
            if "not known yet" in reply.reason:  # how fast the model is: a heartbeat tells
                await asyncio.sleep(0.05)
                continue
            deadline_ms *= 4
            started.config.uuid = f"{uuid}-{deadline_ms}"

    async def build_and_start(self, name: str = "m", path: str = "m.json", **config: Any) -> None:
        reply = await self.call(build_model=pb.ModelStructConfig(model_name=name, model_path=path, **config))
        assert reply.as_status == 0, reply.reason
        reply = await self.call(start_model=pb.ModelName(model_name=name))
        assert reply.as_status == 0, reply.reason

    async def submit(
        self, uuid: str, prompt: list[int], new: int, model: str = "m", **config: Any
    ) -> fleet.Reply:
        return await self.call(start_request=request(uuid, prompt, new, model, **config))

    async def result(self, uuid: str, tenant: str = "default") -> Batch:
        """Waits until a request has ended, and reads it all."""
        rid = f"{tenant}/{uuid}"
        await until_ended(self.wakeups, self.streams, rid)
        return await self.streams.read(rid, 0)

    async def generated(self, uuid: str, tokens: int, tenant: str = "default") -> None:
        """Waits until a request's stream holds so many tokens."""
        rid = f"{tenant}/{uuid}"

        async def enough() -> bool:
            return (await self.streams.view(rid)).num_tokens >= tokens

        await until(self.wakeups, rid, enough)

    async def close(self) -> None:
        await self.client.close()
        await self.wakeups.close()
        await self.store.close()
        for process in [*self.workers, self.broker]:
            if process is not None and process.popen.poll() is None:
                process.signal(signal.SIGCONT)
                process.kill()


async def until(wakeups: Wakeups, rid: str, holds: Callable[[], Awaitable[bool]]) -> None:
    """Waits for something that is looked at again whenever a stream may have changed.

    The event is cleared before the look: a change during the look must wake the wait that follows it.
    """
    async with wakeups.watch(rid) as event:
        while True:
            event.clear()
            if await holds():
                return
            await asyncio.wait_for(event.wait(), LIMIT_S)


async def polled(holds: Callable[[], Awaitable[object]]) -> None:
    """Waits for something that other processes do, which nobody tells."""
    async with asyncio.timeout(LIMIT_S):
        while not await holds():
            await asyncio.sleep(0.02)


async def until_ended(wakeups: Wakeups, streams: Streams, rid: str) -> None:
    """Waits for a request's terminal record."""

    async def ended() -> bool:
        return (await streams.view(rid)).status not in (pb.Init, pb.Generating)

    await until(wakeups, rid, ended)


def request(
    uuid: str, prompt: list[int], new: int, model: str = "m", **config: Any
) -> pb.StartRequestRequest:
    """A greedy request for `new` tokens, eos ignored."""
    r = pb.StartRequestRequest(model_name=model)
    tensor = r.inputs.tensor_map["input_ids"]
    tensor.shape.dims[:] = [1, len(prompt)]
    tensor.data_type = pb.INT64
    tensor.data = np.asarray(prompt, "<i8").tobytes()
    r.config.uuid = uuid
    r.config.max_length = len(prompt) + new
    for key, value in config.items():
        setattr(r.config, key, value)
    return r
