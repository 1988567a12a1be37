"""Several brokers at once: any of them serves any client, and none of them is missed."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from allspark.launcher.ports import free_port
from allspark_bus import broker_client
from allspark_bus.broker_client import BrokerClient, raise_for
from allspark_bus.store import Store
from allspark_bus.streams import Batch, Streams
from allspark_bus.wakeups import Wakeups
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from tests.conftest import ValkeyProcess
from tests.fleet.harness import BROKER, SCRIPTED, Process, request, until_ended
from tests.fleet.scripted_engine import expected_tokens
from tests.network.proxy import CLEAR, FAULTS, Network

PATIENCE_S = 90.0


class TwoBrokers:
    """Two brokers, a client of each and one of both. Proxies: clients to brokers, brokers to the store."""

    def __init__(self, redis: str, directory: Path, network: Network) -> None:
        self.redis, self.directory, self.network = redis, directory, network
        self.frontends, self.backends = (
            [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)] for _ in range(2)
        )
        self.brokers: list[Process | None] = [None, None]
        self.workers: list[Process] = []
        for name, step_s in (("m", 0.02), ("slow", 0.2)):
            (directory / f"{name}.json").write_text(json.dumps({"step_s": step_s, "max_batch": 4}))
        self.store = Store(redis)
        self.streams, self.wakeups = Streams(self.store), Wakeups(self.store)
        doors = [network.through(f"client {i}", self.frontends[i]) for i in range(2)]
        self.each = [BrokerClient([door]) for door in doors]
        self.both = BrokerClient(doors)

    def start_broker(self, i: int) -> None:
        self.brokers[i] = Process(
            sys.executable, "-c", BROKER, f"--redis={self.network.through(f'broker {i}', self.redis)}",
            f"--frontend={self.frontends[i]}", f"--backend={self.backends[i]}",
            f"--model-root={self.directory}", "--heartbeat-s=0.1", "--worker-timeout-s=8",
            "--ack-timeout-s=8",
        )  # fmt: skip

    def start_worker(self) -> None:
        worker = Process(
            sys.executable, SCRIPTED, f"--redis={self.redis}", *(f"--broker={b}" for b in self.backends),
            f"--model-root={self.directory}", "--heartbeat-s=0.1", "--broker-timeout-s=3",
        )  # fmt: skip
        self.workers.append(worker)

    async def build_and_start(self, name: str = "m", path: str = "m.json") -> None:
        config = pb.ModelStructConfig(model_name=name, model_path=path)
        await self.ok(self.each[0], build_model=config)
        await self.ok(self.each[0], start_model=pb.ModelName(model_name=name))

    async def ok(self, client: BrokerClient, **call: object) -> fleet.Reply:
        return raise_for(await client.call(fleet.Envelope(**call), PATIENCE_S))  # type: ignore[arg-type]

    async def submit(self, client: BrokerClient, uuid: str, new: int = 40, model: str = "m") -> None:
        await self.ok(client, start_request=request(uuid, prompt_of(uuid), new, model))

    async def status(self, i: int) -> fleet.FleetStatus:
        return (await self.ok(self.each[i], get_fleet_status=fleet.GetFleetStatus())).fleet_status

    async def result(self, uuid: str) -> Batch:
        await asyncio.wait_for(until_ended(self.wakeups, self.streams, f"default/{uuid}"), PATIENCE_S)
        return await self.streams.read(f"default/{uuid}", 0)

    async def check(self, uuids: list[str], new: int = 40) -> None:
        for uuid in uuids:
            batch = await self.result(uuid)
            assert list(batch.tokens) == expected_tokens(prompt_of(uuid), new), uuid
            assert batch.reason == "length", uuid

    async def close(self) -> None:
        for client in (*self.each, self.both):
            await client.close()
        await self.wakeups.close()
        await self.store.close()
        for process in (*self.workers, *self.brokers):
            if process is not None:
                process.signal(signal.SIGCONT)
                process.kill()


def prompt_of(uuid: str) -> list[int]:
    return [1 + b for b in uuid.encode()]


@pytest.fixture
async def two(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[TwoBrokers]:
    with Network() as network:
        made = TwoBrokers(valkey.url, tmp_path, network)
        try:
            made.start_broker(0)
            made.start_worker()
            await made.build_and_start()
            yield made
        finally:
            await made.close()


@pytest.mark.slow
async def test_two_brokers_share_the_work_of_the_same_workers(two: TwoBrokers) -> None:
    two.start_broker(1)  # it joins later, and knows everything at once
    uuids = [f"u{i}" for i in range(24)]
    for i, uuid in enumerate(uuids):
        await two.submit(two.each[i % 2], uuid)
    await asyncio.gather(*[two.submit(client, "twice") for client in (*two.each, two.both)])
    statuses = [await two.status(i) for i in range(2)]
    assert min(s.accepted_total for s in statuses) >= 12
    assert sum(s.accepted_total for s in statuses) == 25, "what is submitted to both runs once"
    await two.check([*uuids, "twice"])
    await _check_that_a_model_is_known_at_once(two)
    await _check_that_a_worker_is_not_filled_twice(two)


async def _check_that_a_model_is_known_at_once(two: TwoBrokers) -> None:
    """A client may start a model here and use it there."""
    for name in ("a", "b", "c"):
        await two.build_and_start(name)
        await two.ok(two.each[1], start_request=request(f"u-{name}", [5], 3, name))


async def _check_that_a_worker_is_not_filled_twice(two: TwoBrokers) -> None:
    """What it accepted from one broker counts for the other."""
    await two.build_and_start("slow", "slow.json")
    capacity = 4 + 4  # batch and what the worker takes ahead
    held = [f"s{i}" for i in range(capacity)]
    for uuid in held:
        await two.submit(two.each[0], uuid, 400, "slow")
    async with asyncio.timeout(PATIENCE_S):
        while (await two.status(1)).inflight_requests != capacity:
            pass  # the worker tells every broker, also of those above that end
    await two.submit(two.each[1], "late", 5, "slow")
    status = await two.status(1)
    assert (status.queued_requests, status.inflight_requests) == (1, capacity), "the worker is full"
    for uuid in held:
        await two.ok(two.each[0], stop_request=pb.StopRequestRequest(uuid=uuid))
    await two.check(["late"], 5)


@pytest.mark.slow
async def test_the_queue_of_a_broker_that_falls_silent_is_taken_over(two: TwoBrokers) -> None:
    two.start_broker(1)
    before = [f"u{i}" for i in range(20)]  # more than the worker takes: most of them wait in the broker
    for uuid in before:
        await two.submit(two.each[0], uuid)
    paused, killed = two.brokers
    assert paused is not None and killed is not None
    paused.signal(signal.SIGSTOP)
    await two.submit(two.both, "during")
    await two.check([*before, "during"])
    paused.signal(signal.SIGCONT)
    await two.submit(two.each[0], "awake")
    await two.check([*before, "during", "awake"])

    again = [f"v{i}" for i in range(20)]
    for uuid in again:
        await two.submit(two.each[1], uuid)
    killed.kill()
    await two.submit(two.both, "after")
    await two.check([*again, "after"])


@pytest.mark.slow
async def test_a_client_leaves_a_broker_that_is_cut_off(
    two: TwoBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.start_broker(1)
    for first in (0, 1):
        for client in two.each:  # both are connected
            await two.ok(client, get_fleet_status=fleet.GetFleetStatus())
        two.both._preferred = first
        [silent] = two.network.of(f"client {first}")
        silent.set(FAULTS["cut"])
        await two.submit(two.both, f"u{first}")
        assert two.both._preferred == 1 - first, "and stays with the other one"
        silent.heal()
        await two.submit(two.each[first], f"v{first}")
        await two.check([f"u{first}", f"v{first}"])

    two.both._preferred = 0
    [store] = two.network.of("broker 0")
    store.set(FAULTS["cut"])
    reply = await two.each[0].call(fleet.Envelope(start_request=request("w", prompt_of("w"), 40)), PATIENCE_S)
    assert reply.unavailable and "Redis is unreachable" in reply.reason, "it acknowledges nothing"
    monkeypatch.setattr(broker_client, "RESEND_S", 1000.0)  # silence is not why it is left now
    await two.submit(two.both, "w")
    assert two.both._preferred == 1
    await two.check(["w"])


@pytest.mark.slow
async def test_a_broker_that_is_cut_off_from_all_workers_leaves_its_requests_to_another_one(
    two: TwoBrokers,
) -> None:
    two.start_broker(1)
    [direct] = two.workers
    two.backends = [two.network.through(f"backend {i}", backend) for i, backend in enumerate(two.backends)]
    two.start_worker()
    direct.kill()
    for i in range(2):
        await _until(two, i, lambda reply: [w.capacity for w in reply.fleet_status.workers] == [8])
    uuids = [f"u{i}" for i in range(20)]  # more than the worker takes: most of them wait in the broker
    for uuid in uuids:
        await two.submit(two.each[0], uuid)
    two.network.set("backend 0", FAULTS["cut"])
    await two.check(uuids)
    await _until(two, 0, lambda reply: reply.unavailable and "reaches no worker" in reply.reason)
    two.both._preferred = 0
    await two.submit(two.both, "during")
    await two.check(["during"])
    two.network.set("backend 0", CLEAR)
    await _until(two, 0, lambda reply: not reply.unavailable)
    await two.submit(two.each[0], "after")
    await two.check(["after"])


async def _until(two: TwoBrokers, i: int, holds: Callable[[fleet.Reply], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        envelope = fleet.Envelope(get_fleet_status=fleet.GetFleetStatus())
        while not holds(await two.each[i].call(envelope, PATIENCE_S)):
            await asyncio.sleep(0.05)  # polling: a broker tells nobody what it hears
