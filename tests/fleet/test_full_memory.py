"""A fleet whose store runs out of memory: new requests are denied, running ones pause and continue."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conftest import ValkeyProcess
from tests.fleet.harness import MiniFleet
from tests.fleet.scripted_engine import expected_tokens
from tests.topologies import fill_memory, free_memory

PROMPTS = {f"u{i}": [i + 1, 5] for i in range(4)}
NUM_TOKENS = 300


@pytest.fixture
async def fleet_(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[MiniFleet]:
    """Requests run, the memory is full, and the worker's buffer as well."""
    f = MiniFleet(valkey.url, tmp_path)
    gate = tmp_path / "memory-is-full"
    f.write_model(step_s=0.005, gate=str(gate), gate_at=10)
    f.start_worker("--publish-buffer=40")
    await f.build_and_start()
    for uuid, prompt in PROMPTS.items():
        assert (await f.submit(uuid, prompt, NUM_TOKENS)).as_status == 0
    for uuid in PROMPTS:
        await f.generated(uuid, 10)
    fill_memory(valkey.port)
    gate.touch()
    await _until(lambda: _rests(f))
    yield f
    await f.close()


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Polls other processes."""
    async with asyncio.timeout(60):
        while not await holds():
            await asyncio.sleep(0.1)


async def _rests(f: MiniFleet) -> bool:
    """Whether the engine makes no progress."""
    found = []
    for _ in range(2):
        stat = (await f.call(get_engine_stat=pb.ModelName(model_name="m"))).engine_stat
        found.append(stat.total_generated_token)
        await asyncio.sleep(0.3)  # sixty steps
    return found[0] == found[1]


async def _assert_all_end_right(f: MiniFleet, uuids: list[str]) -> None:
    for uuid in uuids:
        batch = await f.result(uuid)
        assert (list(batch.tokens), batch.reason) == (expected_tokens(PROMPTS[uuid], NUM_TOKENS), "length")

    async def all_have_ended() -> bool:
        return await f.ledger.num_open("m") == 0

    await _until(all_have_ended)  # the index follows


async def test_running_requests_pause_and_new_ones_are_denied_until_there_is_memory(
    fleet_: MiniFleet, valkey: ValkeyProcess
) -> None:
    reply = await fleet_.submit("new", [1], 5)
    assert (reply.as_status, reply.unavailable) == (pb.ALLSPARK_REQUEST_DENIED, False)
    assert "memory of Redis is full" in reply.reason and reply.retry_after_ms > 0
    assert (await fleet_.submit("u0", PROMPTS["u0"], NUM_TOKENS)).as_status == 0, "it was accepted before"
    for uuid in PROMPTS:
        view = await fleet_.streams.view(f"default/{uuid}")
        assert view.status in (pb.Init, pb.Generating) and view.num_tokens < NUM_TOKENS
    free_memory(valkey.port)
    await _assert_all_end_right(fleet_, list(PROMPTS))
    assert (await fleet_.submit("new", [1], 5)).as_status == 0
    assert list((await fleet_.result("new")).tokens) == expected_tokens([1], 5)


async def test_a_dead_workers_requests_are_claimed_and_others_released_while_the_memory_is_full(
    fleet_: MiniFleet, valkey: ValkeyProcess
) -> None:
    first = await fleet_.ledger.load("default/u1")
    assert first is not None
    fleet_.workers[0].kill()
    fleet_.start_worker("--publish-buffer=40")

    async def runs_again() -> bool:
        entry = await fleet_.ledger.load("default/u1")
        return entry is not None and entry.epoch >= first.epoch + 2  # claimed, then dispatched

    await _until(runs_again)
    assert (await fleet_.call(stop_request=pb.StopRequestRequest(uuid="u0"))).as_status == 0
    assert (await fleet_.streams.view("default/u0")).reason == "stopped"
    for uuid in ("u0", "u3"):  # one that has ended, and one that runs
        assert (await fleet_.call(release_request=pb.StopRequestRequest(uuid=uuid))).as_status == 0
        assert (await fleet_.streams.view(f"default/{uuid}")).outcome == "released"
    assert fleet_.broker is not None
    fleet_.broker.kill()
    fleet_.start_broker()
    free_memory(valkey.port)
    await _assert_all_end_right(fleet_, ["u1", "u2"])
