"""What a worker writes: publish granularity, and a store that goes away in the middle."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import records

from tests.conftest import ValkeyProcess
from tests.fleet.harness import MiniFleet, request
from tests.fleet.scripted_engine import expected_tokens


@pytest.fixture
async def fleet_(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[MiniFleet]:
    f = MiniFleet(valkey.url, tmp_path)
    yield f
    await f.close()


async def entries(f: MiniFleet, uuid: str) -> list[records.Record]:
    found = await f.store.command("XRANGE", keys.stream(f"default/{uuid}"), "-", "+")
    return [records.decode(fields[1]) for _, fields in found]


@pytest.mark.parametrize(("first", "later"), [(0, 0), (1, 1), (4, 3), (100, 1)])
async def test_tokens_are_published_in_the_batches_that_were_asked_for(
    fleet_: MiniFleet, first: int, later: int
) -> None:
    fleet_.write_model(step_s=0.005)
    fleet_.start_worker()
    await fleet_.build_and_start()
    await fleet_.submit("u", [8, 9], 20, first_token_num=first, async_token_num=later)
    await fleet_.result("u")
    got = await entries(fleet_, "u")
    assert records.tokens_of(got) == expected_tokens([8, 9], 20)
    assert [r.position for r in got] == [sum(len(e.tokens) for e in got[:i]) for i in range(len(got))]
    assert len(got[0].tokens) >= min(first, 20)
    assert all(len(r.tokens) >= later for r in got[1:-1])
    assert [r.is_terminal for r in got] == [False] * (len(got) - 1) + [True]


async def test_fast_steps_share_an_append_but_the_first_token_and_the_end_do_not_wait(
    fleet_: MiniFleet,
) -> None:
    gate = fleet_.directory / "the-first-is-there"
    fleet_.write_model(step_s=0.001, gate=str(gate), gate_at=1)
    fleet_.start_worker("--publish-interval-s=600")
    await fleet_.build_and_start()
    await fleet_.submit("u", [8, 9], 20)
    await fleet_.generated("u", 1)
    gate.touch()
    await fleet_.result("u")
    first, last = await entries(fleet_, "u")
    assert first.position == 0 and not first.is_terminal
    assert last.is_terminal and len(last.tokens) == 19
    assert records.tokens_of([first, last]) == expected_tokens([8, 9], 20)


async def test_a_store_that_restarts_loses_and_doubles_nothing(
    fleet_: MiniFleet, valkey: ValkeyProcess
) -> None:
    """The buffer is smaller than what is generated meanwhile, so the requests have to pause."""
    gate = fleet_.directory / "the-store-is-away"
    fleet_.write_model(step_s=0.005, gate=str(gate), gate_at=20)
    fleet_.start_worker("--publish-buffer=40")
    await fleet_.build_and_start()
    prompts = {f"u{i}": [i + 1, 5] for i in range(6)}
    for uuid, prompt in prompts.items():
        assert (await fleet_.submit(uuid, prompt, 300)).as_status == 0
    await fleet_.generated("u0", 20)
    valkey.kill()
    gate.touch()
    stat = (await fleet_.call(get_engine_stat=pb.ModelName(model_name="m"))).engine_stat
    generated = 0
    while generated < stat.total_generated_token:  # until the worker makes no more progress: it has paused
        generated = stat.total_generated_token
        await asyncio.sleep(0.3)
        stat = (await fleet_.call(get_engine_stat=pb.ModelName(model_name="m"))).engine_stat
    assert generated < 6 * 300, "the requests paused"
    valkey.start()
    for uuid, prompt in prompts.items():
        batch = await fleet_.result(uuid)
        assert list(batch.tokens) == expected_tokens(prompt, 300), uuid


async def test_a_submit_while_the_store_is_away_is_refused_with_the_reason(
    fleet_: MiniFleet, valkey: ValkeyProcess
) -> None:
    fleet_.write_model()
    fleet_.start_worker()
    await fleet_.build_and_start()
    valkey.kill()
    reply = await fleet_.once(start_request=request("u", [1], 5))
    assert reply.as_status == FleetError.status
    assert "Redis is unreachable" in reply.reason
    valkey.start()
    assert (await fleet_.submit("u", [1], 5)).as_status == 0
    assert list((await fleet_.result("u")).tokens) == expected_tokens([1], 5)
