"""Very many open requests at once: each accepted, read by a parked Get, served to its right end, released.

``python -m tests.fleet.open_requests --count 10000`` prints what an open request costs each process. The
scripted engine begins when a file appears, so that all of them are open together however fast the machine is.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from allspark.cli.memory_watch import resident_mib
from allspark.client import ModelOptions
from allspark.launcher import Fleet, FleetOptions
from allspark_bus.broker_client import BrokerClient
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet_pb
from allspark_proto import metadata
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

from tests.fleet.harness import request
from tests.fleet.scripted_engine import expected_tokens

SCRIPTED = str(Path(__file__).with_name("scripted_engine.py"))
CONNECTIONS = 4
AT_ONCE = 200  # submissions in progress
NEW = 3
ASKED = 50  # status calls while everything is open
LIMIT_S = 300.0
MAX_BATCH = 64


@dataclass
class Report:
    """Redis connections before the first request and while all Gets are parked; resident MiB likewise."""

    count: int
    open_requests: int = 0
    connections: tuple[int, int] = (0, 0)
    before_mib: dict[str, float] = field(default_factory=dict)
    open_mib: dict[str, float] = field(default_factory=dict)
    released_mib: dict[str, float] = field(default_factory=dict)
    status_ms: list[float] = field(default_factory=list)
    submit_s: float = 0.0
    end_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def kib_each(self) -> dict[str, float]:
        """What an open request adds to each process."""
        return {n: 1024 * (self.open_mib[n] - mib) / self.count for n, mib in self.before_mib.items()}


class Clients:
    """Stubs of several connections in turn."""

    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CONNECTIONS)]
        self._stubs = itertools.cycle([AllSparkStub(channel) for channel in self._channels])

    async def call(self, name: str, message: Any, *pairs: tuple[str, str]) -> tuple[Any, dict[str, Any]]:
        call = getattr(next(self._stubs), name)(message, timeout=LIMIT_S, metadata=pairs)
        return await call, dict(await call.trailing_metadata() or ())

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def prompt_of(n: int) -> list[int]:
    return [1 + n % 900, 1 + n // 900]


async def submit(clients: Clients, n: int, gate: asyncio.Semaphore) -> int:
    async with gate:
        reply, _ = await clients.call("StartRequest", request(f"u{n}", prompt_of(n), NEW))
        return int(reply.as_status)


async def read(clients: Clients, n: int) -> str:
    """Gets until the end; what is wrong about it, or ""."""
    tokens: list[int] = []
    while True:
        reply, trailing = await clients.call(
            "Get", pb.UUID(uuid=f"u{n}"), (metadata.CURSOR, str(len(tokens)))
        )
        tokens += reply.ids_from_generate
        if reason := trailing.get(metadata.FINISH_REASON):
            break
        if reply.empty:
            return f"u{n}: nothing to read"
    await clients.call("ReleaseRequest", pb.StopRequestRequest(uuid=f"u{n}", model_name="m"))
    is_right = tokens == expected_tokens(prompt_of(n), NEW) and reason == "length"
    return "" if is_right else f"u{n}: {tokens}, {reason}"


async def num_connections(store: Store) -> int:
    """Those that last: a process that waits for an answer may try another connection for a moment."""
    found = []
    for _ in range(5):
        found.append(len((await store.command("CLIENT", "LIST")).splitlines()))
        await asyncio.sleep(0.2)  # a moment
    return min(found)


async def num_subscribed(store: Store) -> int:
    return len(await store.command("PUBSUB", "CHANNELS", "as:*"))


def memory(fleet: Fleet) -> dict[str, float]:
    return {name: resident_mib(process.pid or 0) for name, process in fleet.processes.items()}


@asynccontextmanager
async def peers(fleet: Fleet) -> AsyncIterator[tuple[Clients, BrokerClient, Store]]:
    clients, broker, store = (
        Clients(fleet.addresses[0]),
        BrokerClient(fleet.frontends),
        Store(fleet.redis_url),
    )
    try:
        yield clients, broker, store
    finally:
        await clients.close()
        await broker.close()
        await store.close()


async def open_and_end(fleet: Fleet, count: int, gate: Path) -> Report:
    report = Report(count)
    async with peers(fleet) as (clients, broker, store):
        await clients.call("GetVersionFull", pb.Empty())
        report.before_mib, connections = memory(fleet), await num_connections(store)
        at_once, began_s = asyncio.Semaphore(AT_ONCE), time.monotonic()
        statuses = await asyncio.gather(*[submit(clients, n, at_once) for n in range(count)])
        report.submit_s = time.monotonic() - began_s
        report.wrong += [f"u{n}: status {s}" for n, s in enumerate(statuses) if s]
        readers = [asyncio.create_task(read(clients, n)) for n in range(count)]
        while await num_subscribed(store) < count and not any(reader.done() for reader in readers):
            await asyncio.sleep(0.05)  # polls Valkey, the other process, until every Get is parked
        report.open_mib, report.connections = memory(fleet), (connections, await num_connections(store))
        reply = await broker.call(fleet_pb.Envelope(get_fleet_status=fleet_pb.GetFleetStatus()), 20)
        report.open_requests = reply.fleet_status.queued_requests + reply.fleet_status.inflight_requests
        for n in range(ASKED):
            asked_s = time.monotonic()
            status, _ = await clients.call("GenerateStatus", pb.UUID(uuid=f"u{n * count // ASKED}"))
            report.status_ms.append(1000 * (time.monotonic() - asked_s))
            report.wrong += [] if status.status == pb.Init else [f"status {status.status} while it waits"]
        began_s = time.monotonic()
        await asyncio.to_thread(gate.touch)
        report.wrong += filter(None, await asyncio.gather(*readers))
        report.end_s = time.monotonic() - began_s
        report.released_mib = memory(fleet)
    return report


def run(count: int) -> Report:
    """A fleet of one of each with room for so many requests; raises if it cannot be started."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "m.json").write_text(json.dumps({"gate": str(root / "gate"), "max_batch": MAX_BATCH}))
        options = FleetOptions(
            start_timeout_s=LIMIT_S,
            worker_command=(sys.executable, SCRIPTED),
            worker_args=("--stall-s=3600",),  # that nothing begins is not its engine's fault
            model_roots=(root,),
            broker_args=(f"--max-queue={count}",),
            gateway_args=(f"--max-calls={2 * count}",),
        )
        with Fleet(options) as fleet:
            fleet.load_model("m", root / "m.json", ModelOptions(max_batch=MAX_BATCH))
            return asyncio.run(asyncio.wait_for(open_and_end(fleet, count, root / "gate"), LIMIT_S))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.open_requests", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    report = run(parser.parse_args().count)
    status_ms = sorted(report.status_ms)
    print(f"open at once: {report.open_requests} of {report.count}, submitted in {report.submit_s:.1f} s")
    print(f"Redis connections before and with all Gets parked: {report.connections}")
    print(
        f"GenerateStatus meanwhile: median {statistics.median(status_ms):.1f} ms, max {status_ms[-1]:.1f} ms"
    )
    for name, kib in report.kib_each().items():
        mib = report.before_mib[name], report.open_mib[name], report.released_mib[name]
        print(
            f"{name}: {mib[0]:.0f}, {mib[1]:.0f}, {mib[2]:.0f} MiB before, open, released: {kib:.1f} KiB each"
        )
    print(f"all ended and were released in {report.end_s:.1f} s; wrong: {report.wrong[:5] or 'none'}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
