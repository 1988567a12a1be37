"""A machine that crashes takes the end of the append-only file with it: streams are shorter than was read."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conftest import ValkeyProcess
from tests.fleet.harness import MiniFleet
from tests.fleet.scripted_engine import expected_tokens

NUM_TOKENS = 200


@pytest.fixture
async def fleet_(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[MiniFleet]:
    f = MiniFleet(valkey.url, tmp_path)
    yield f
    await f.close()


@pytest.mark.parametrize("worker_dies", [False, True])
async def test_a_reader_beyond_the_end_waits_and_gets_every_token_once(
    fleet_: MiniFleet, valkey: ValkeyProcess, worker_dies: bool
) -> None:
    gate = fleet_.directory / "the-beginning-is-measured"
    fleet_.write_model(step_s=0.02, gate=str(gate), gate_at=10)
    fleet_.start_worker()
    await fleet_.build_and_start()
    assert (await fleet_.submit("u", [7, 8], NUM_TOKENS)).as_status == 0
    [log] = (valkey.directory / "appendonlydir").glob("*.incr.aof")
    await fleet_.generated("u", 10)
    kept = log.stat().st_size
    gate.touch()
    await fleet_.generated("u", 60)
    received = list((await fleet_.streams.read("default/u", 0)).tokens)
    if worker_dies:
        fleet_.workers[0].kill()
    valkey.kill()
    os.truncate(log, kept)
    valkey.start()

    beyond = await fleet_.streams.read("default/u", len(received))
    assert beyond.outcome == "ok" and not beyond.status
    if worker_dies:
        assert beyond.tokens == (), "the stream is shorter, and nobody appends"
        assert (await fleet_.streams.view("default/u")).status in (pb.Init, pb.Generating)
        fleet_.start_worker()
    await fleet_.result("u")
    rest = await fleet_.streams.read("default/u", len(received))
    assert received + list(rest.tokens) == expected_tokens([7, 8], NUM_TOKENS)
    assert list((await fleet_.streams.read("default/u", 0)).tokens) == expected_tokens([7, 8], NUM_TOKENS)
