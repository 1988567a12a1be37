"""Workers that a broker took for dead: which of them live, and which their requests killed."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_proto import allspark_service_pb2 as pb

from tests.conftest import ValkeyProcess
from tests.fleet.harness import MiniFleet, Process, until
from tests.fleet.scripted_engine import expected_tokens
from tests.network.proxy import CLEAR, FAULTS, Network

PATIENCE_S = 60.0
NUM_TOKENS = 20_000  # more than are generated while a test runs


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture
async def made(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[MiniFleet]:
    f = MiniFleet(valkey.url, tmp_path)
    yield f
    await f.close()


def start_worker(f: MiniFleet, network: Network, name: str) -> Process:
    """Behind a proxy of its own, of that name."""
    direct, f.backend = f.backend, network.through(name, f.backend)
    try:
        return f.start_worker()
    finally:
        f.backend = direct


async def until_held_by(f: MiniFleet, process: Process) -> None:
    """Until the request is dispatched to a worker, and that has appended to it."""
    before = (await f.streams.view("default/u")).num_tokens

    async def holds() -> bool:
        worker = await f.store.command("HGET", keys.request("default/u"), "wk")
        view = await f.streams.view("default/u")
        return bool(worker == process.addresses["worker"].encode() and view.num_tokens > before)

    await until(f.wakeups, "default/u", holds)


@pytest.mark.slow
async def test_a_cut_workers_requests_are_not_called_poison(made: MiniFleet, network: Network) -> None:
    made.write_model(step_s=0.05, max_length=2 * NUM_TOKENS)
    first = start_worker(made, network, "first")
    await made.build_and_start()
    await made.submit("u", [5, 6], NUM_TOKENS)
    await until_held_by(made, first)
    second = start_worker(made, network, "second")
    network.set("first", FAULTS["cut"])
    await until_held_by(made, second)
    async with asyncio.timeout(PATIENCE_S):
        # Without having heard of the broker, which still takes it for dead.
        while await made.store.command("HGET", keys.request("default/u"), "dt") != b"0":
            await asyncio.sleep(0.02)  # polling: nobody is told of it
    network.set("first", CLEAR)
    second.kill()
    await until_held_by(made, first)
    first.kill()
    third = start_worker(made, network, "third")
    batch = await asyncio.wait_for(made.result("u"), PATIENCE_S)
    assert (batch.status, batch.reason) == (pb.GenerateInterrupted, "poison"), "two of them did die"
    assert third.popen.poll() is None
    assert list(batch.tokens) == expected_tokens([5, 6], NUM_TOKENS)[: len(batch.tokens)]


@pytest.mark.slow
async def test_a_request_whose_workers_stop_for_good_is_quarantined(
    made: MiniFleet, network: Network
) -> None:
    made.write_model(step_s=0.05, max_length=2 * NUM_TOKENS)
    first = start_worker(made, network, "first")
    await made.build_and_start()
    await made.submit("u", [5, 6], NUM_TOKENS)
    await until_held_by(made, first)
    second = start_worker(made, network, "second")
    first.signal(signal.SIGSTOP)
    await until_held_by(made, second)
    second.signal(signal.SIGSTOP)
    start_worker(made, network, "third")
    batch = await asyncio.wait_for(made.result("u"), PATIENCE_S)
    assert (batch.status, batch.reason) == (pb.GenerateInterrupted, "poison")
    for process in (first, second):
        process.signal(signal.SIGCONT)
    assert (await made.result("u")).reason == "poison", "an end is final"
