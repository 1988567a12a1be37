"""Every process of a fleet is replaced, one at a time, while requests run; and a fleet without workers."""

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from allspark.client import AsyncClient, GenerateOptions
from allspark.launcher import Fleet, FleetOptions

from tests.fleet.scripted_engine import expected_tokens
from tests.system.conftest import SCRIPTED, report

NUM_CLIENTS = 6
NUM_TOKENS = 60


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "m.json").write_text('{"max_length": 512, "max_batch": 8, "step_s": 0.01}')
    options = FleetOptions(
        workers=2,
        brokers=2,
        gateways=2,
        model_roots=(tmp_path,),
        worker_command=(sys.executable, SCRIPTED),
        worker_args=("--drain-s=0.2",),  # less than a request takes, so some are handed over
        drain_s=30.0,
        start_timeout_s=300.0,
    )
    with Fleet(options, report) as fleet:
        fleet.load_model("m", tmp_path / "m.json")
        yield fleet


async def test_no_request_notices_that_every_process_is_replaced(fleet: Fleet) -> None:
    serial, reasons, is_over = itertools.count(), Counter[str](), asyncio.Event()

    async def ask(client: AsyncClient) -> None:
        number = next(serial)
        prompt = [number % 900 + 1, 5]
        request = await client.submit("m", prompt, GenerateOptions(max_new_tokens=NUM_TOKENS))
        assert await request.result() == expected_tokens(prompt, NUM_TOKENS), f"request {number}"
        reasons[request.finish_reason] += 1
        await request.release()

    async def work(number: int) -> None:
        turn = number % len(fleet.addresses)
        addresses = [*fleet.addresses[turn:], *fleet.addresses[:turn]]
        async with AsyncClient(addresses, retry_s=60.0) as client:
            while not is_over.is_set():
                await ask(client)

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(work(number))
        for process in [*fleet.workers, *fleet.brokers, *fleet.gateways]:
            await asyncio.to_thread(fleet.replace, process)
            assert process.exit_code == 0, process.name
        is_over.set()
    assert set(reasons) == {"length"} and reasons["length"] >= NUM_CLIENTS
    async with AsyncClient(fleet.addresses) as client:
        await ask(client)


async def test_requests_that_an_empty_fleet_accepted_run_when_a_worker_comes(fleet: Fleet) -> None:
    async with AsyncClient(fleet.addresses, retry_s=60.0) as client:
        for worker in fleet.workers:
            worker.stop(60.0)
        requests = [
            await client.submit("m", [i + 1, 3], GenerateOptions(max_new_tokens=20)) for i in range(3)
        ]
        await asyncio.to_thread(fleet.add_worker)
        for i, request in enumerate(requests):
            assert await request.result() == expected_tokens([i + 1, 3], 20)
