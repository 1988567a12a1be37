"""Requests that name an adapter: refused with the worker's reason, or passed on with the name."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.fleet.harness import MiniFleet
from tests.fleet.scripted_engine import expected_tokens


@pytest.fixture
async def fleet_(valkey, tmp_path: Path) -> AsyncIterator[MiniFleet]:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path)
    f.write_model()
    f.start_worker()
    await f.build_and_start()
    yield f
    await f.close()


BAD = {
    "missing": (pb.ALLSPARK_PARAM_ERROR, "no adapter 'missing'"),
    "unreadable": (pb.ALLSPARK_IO_ERROR, "cannot be read"),
    "large": (pb.ALLSPARK_EXCEED_LIMIT_ERROR, "the limit is 64"),
    "unsupported": (pb.ALLSPARK_PARAM_ERROR, "use_dora"),
    "x" * 600: (pb.ALLSPARK_PARAM_ERROR, "lora_name"),
}


async def test_bad_adapters_are_refused_before_anything_is_recorded(fleet_: MiniFleet) -> None:
    for number, (name, (status, reason)) in enumerate(BAD.items()):
        reply = await fleet_.submit(f"u{number}", [5, 6, 7], 4, lora_name=name)
        assert (reply.as_status, reason in reply.reason) == (status, True), reply
        assert await fleet_.store.command("KEYS", f"*u{number}*") == []
    assert (await fleet_.submit("u0", [5, 6, 7], 4)).as_status == 0, "the uuid is free"


async def test_a_good_one_runs_and_a_retry_is_answered_alike_when_the_adapter_is_gone(
    fleet_: MiniFleet,
) -> None:
    assert (await fleet_.submit("u", [5, 6, 7], 9, lora_name="good")).as_status == 0
    assert list((await fleet_.result("u")).tokens) == expected_tokens([5, 6, 7], 9, lora="good")
    (fleet_.directory / "good.gone").touch()
    # The model's new generation makes the broker ask again.
    await fleet_.call(stop_model=pb.ModelName(model_name="m"))
    assert (await fleet_.call(start_model=pb.ModelName(model_name="m"))).as_status == 0
    assert (await fleet_.submit("v", [5], 4, lora_name="good")).as_status == pb.ALLSPARK_PARAM_ERROR
    assert (await fleet_.submit("u", [5, 6, 7], 9, lora_name="good")).as_status == 0
