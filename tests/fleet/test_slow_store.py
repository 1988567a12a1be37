"""A store that is up but does not answer for a while (SIGSTOP): nobody dies of it, nothing is lost."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_bus.errors import StoreUnavailable
from allspark_bus.store import Store
from allspark_proto import fleet_pb2 as fleet

from tests.conftest import ValkeyProcess
from tests.fleet.harness import WORKER_TIMEOUT_S, MiniFleet, polled, request
from tests.fleet.scripted_engine import expected_tokens

PROMPTS = {f"u{i}": [i + 1, 5] for i in range(4)}
NUM_TOKENS = 400


@pytest.fixture
async def fleet_(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[MiniFleet]:
    f = MiniFleet(valkey.url, tmp_path)
    yield f
    await f.close()


async def test_requests_continue_on_their_workers_and_calls_are_answered_in_time(
    fleet_: MiniFleet, valkey: ValkeyProcess
) -> None:
    """The store pauses for longer than a broker waits for a silent worker."""
    gate = fleet_.directory / "the-store-is-silent"
    fleet_.write_model(step_s=0.01, gate=str(gate), gate_at=10)
    fleet_.start_worker("--publish-buffer=40")
    await fleet_.build_and_start()
    for uuid, prompt in PROMPTS.items():
        assert (await fleet_.submit(uuid, prompt, NUM_TOKENS)).as_status == 0
    await fleet_.generated("u0", 10)
    before = {uuid: await fleet_.ledger.load(f"default/{uuid}") for uuid in PROMPTS}
    assert valkey.process is not None
    valkey.process.send_signal(signal.SIGSTOP)
    gate.touch()

    async def has_lasted() -> bool:
        status = (await fleet_.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status
        return status.workers[0].store_silent_s > WORKER_TIMEOUT_S

    try:
        reply = await fleet_.once(start_request=request("late", [3], 5))
        await polled(has_lasted)
    finally:
        valkey.process.send_signal(signal.SIGCONT)
    assert reply.unavailable and reply.retry_after_ms > 0 and "Redis is unreachable" in reply.reason
    assert (await fleet_.submit("late", [3], 5)).as_status == 0
    for uuid, prompt in PROMPTS.items():
        batch = await fleet_.result(uuid)
        assert (list(batch.tokens), batch.reason) == (expected_tokens(prompt, NUM_TOKENS), "length"), uuid
        epoch, deaths = await fleet_.store.command("HMGET", keys.request(f"default/{uuid}"), "ep", "dt")
        entry = before[uuid]
        assert entry is not None and (int(epoch), int(deaths)) == (entry.epoch, 0), "nobody took it over"
    assert list((await fleet_.result("late")).tokens) == expected_tokens([3], 5)


async def test_a_call_waits_no_longer_than_it_is_patient_though_the_connection_stands(
    valkey: ValkeyProcess,
) -> None:
    store, patient = Store(valkey.url, patience_s=0.3), Store(valkey.url, patience_s=60)
    await patient.command("SET", "k", "1")

    async def is_answered() -> bool:
        with contextlib.suppress(StoreUnavailable):
            return await store.command("GET", "k") == b"1"
        return False

    await polled(is_answered)
    assert valkey.process is not None
    valkey.process.send_signal(signal.SIGSTOP)
    try:
        first = asyncio.ensure_future(store.command("GET", "k"))
        for call in (first, store.command("GET", "k")):
            with pytest.raises(StoreUnavailable, match="unreachable"):
                # Far less than the time after which a connection without replies is given up.
                await asyncio.wait_for(call, 8)
    finally:
        valkey.process.send_signal(signal.SIGCONT)
    assert await patient.command("GET", "k") == b"1"
    await store.close()
    await patient.close()
