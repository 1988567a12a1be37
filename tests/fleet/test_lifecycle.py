"""The model state machine (spec 1.2) through a real broker and real workers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from tests.fleet.harness import MiniFleet
from tests.fleet.scripted_engine import expected_tokens

OK, PARAM, IO, MEMORY, RUNTIME, INVALID, DENIED = 0, 2, 3, 4, 5, 8, 12


@pytest.fixture
async def fleet_(valkey, tmp_path: Path) -> AsyncIterator[MiniFleet]:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path)
    f.write_model()
    f.start_worker()
    yield f
    await f.close()


async def act(f: MiniFleet, action: str, **config: object) -> int:
    """Runs one RPC of the state table on model "m"; the status."""
    if action == "build":
        reply = await f.call(
            build_model=pb.ModelStructConfig(**({"model_name": "m", "model_path": "m.json"} | config))
        )
    elif action == "request":
        reply = await f.submit(f"u{config.get('n', 0)}", [1, 2], 3)
    else:
        reply = await f.call(**{f"{action}_model": pb.ModelName(model_name="m")})
    assert reply.as_status == 0 or reply.reason, "every refusal has a reason"
    return reply.as_status


async def test_the_transition_table(fleet_: MiniFleet) -> None:
    rows = [
        # state absent
        ("start", INVALID), ("request", PARAM), ("unload", PARAM), ("reload", RUNTIME),
        ("stop", INVALID), ("release", INVALID),
        # absent -> built
        ("build", OK), ("build", OK), ("request", INVALID), ("reload", OK), ("stop", OK),
        # built -> unloaded -> built
        ("unload", OK), ("unload", OK), ("build", OK), ("start", INVALID), ("request", INVALID), ("stop", OK),
        ("reload", OK), ("reload", OK),
        # built -> running
        ("start", OK), ("start", OK), ("build", OK), ("request", OK), ("reload", OK),
    ]  # fmt: skip
    for i, (action, status) in enumerate(rows):
        assert await act(fleet_, action) == status, (i, action)
    await fleet_.result("u0")
    assert await act(fleet_, "build", engine_max_batch=3) == INVALID, "another configuration while running"
    assert await act(fleet_, "stop") == RUNTIME, "stopped, but a result is not released"
    assert list((await fleet_.streams.read("default/u0", 0)).tokens) == expected_tokens([1, 2], 3)
    rows = [
        ("request", DENIED), ("stop", OK), ("unload", OK), ("reload", OK), ("start", OK), ("request", OK),
        ("release", OK), ("request", PARAM), ("release", INVALID),
    ]  # fmt: skip
    for n, (action, status) in enumerate(rows, 1):
        assert await act(fleet_, action, n=n) == status, (n, action)
    left = {k.decode() for k in await fleet_.store.command("KEYS", "as:model*")}
    assert left == set()


async def test_an_identical_build_joins_the_one_in_progress(fleet_: MiniFleet) -> None:
    fleet_.write_model("slow.json", load_s=0.5)
    builds = [act(fleet_, "build", model_path="slow.json") for _ in range(5)]
    assert await asyncio.gather(*builds) == [OK] * 5


BAD_BUILDS = [
    ({"model_name": ""}, PARAM, "model_name"),
    ({"model_path": ""}, IO, "model_path is empty"),
    ({"model_path": "missing.json"}, IO, "does not exist"),
    ({"model_path": "../outside.json"}, IO, "outside the model root"),
    ({"model_path": "/etc/passwd"}, IO, "outside the model root"),
    ({"model_path": "link.json"}, IO, "outside the model root"),
    ({"model_path": "not-json"}, IO, "no scripted model"),
    ({"weights_path": "missing.json"}, IO, "does not exist"),
    ({"model_path": "fails.json"}, MEMORY, "told to fail"),
    ({"compute_unit": "cpu:0"}, PARAM, "compute_unit"),
    ({"compute_unit": "TPU:0"}, PARAM, "compute_unit"),
    ({"compute_unit": "CUDA:"}, PARAM, "compute_unit"),
    ({"compute_unit": "CPU:x"}, PARAM, "compute_unit"),
    ({"matmul_precision": "sloppy"}, PARAM, "matmul_precision"),
    ({"engine_max_length": 2}, PARAM, "engine_max_length"),
    ({"engine_max_batch": -1}, PARAM, "engine_max_batch"),
    ({"engine_max_batch": 65_537}, PARAM, "engine_max_batch"),
    ({"swap_threshold": -2}, PARAM, "swap_threshold"),
    ({"cache_span_size": 17}, PARAM, "cache_span_size"),
    ({"cache_mode": 3}, PARAM, "cache_mode is 3, legal are 0, 1 (int8), 2 (uint4)"),
    ({"cache_mode": -1}, PARAM, "cache_mode is -1"),
    ({"lora_names": {"names": [""]}}, PARAM, "lora_names holds an empty name"),
    ({"lora_names": {"names": ["x" * 513]}}, PARAM, "lora_names"),
    ({"lora_names": {"names": ["missing"]}}, PARAM, "no adapter 'missing'"),
    ({"lora_names": {"names": ["unreadable"]}}, IO, "cannot be read"),
    ({"lora_names": {"names": ["large"]}}, pb.ALLSPARK_EXCEED_LIMIT_ERROR, "the limit is 64"),
]


async def test_builds_that_must_fail(fleet_: MiniFleet) -> None:
    fleet_.write_model("fails.json", fail="load")
    (fleet_.directory / "not-json").write_text("GGUF?")
    (fleet_.directory / "link.json").symlink_to("/etc/passwd")
    for config, status, reason in BAD_BUILDS:
        full = {"model_name": "m", "model_path": "m.json"} | config
        reply = await fleet_.call(build_model=pb.ModelStructConfig(**full))
        assert reply.as_status == status, config
        assert reason in reply.reason, config
        assert await fleet_.store.command("KEYS", keys.model("*")) == [], "rolled back"
    assert await act(fleet_, "build") == OK, "the name is free again"


async def test_a_failed_rebuild_leaves_the_old_model(fleet_: MiniFleet) -> None:
    fleet_.write_model("fails.json", fail="load")
    await act(fleet_, "build")
    assert await act(fleet_, "build", model_path="fails.json") == MEMORY
    assert await act(fleet_, "start") == OK
    await act(fleet_, "request")
    assert (await fleet_.result("u0")).reason == "length"


async def test_a_model_that_cannot_start_stays_built(fleet_: MiniFleet) -> None:
    fleet_.write_model("m.json", fail="start")
    assert await act(fleet_, "build") == OK
    assert await act(fleet_, "start") == MEMORY
    assert await act(fleet_, "request") == INVALID


async def test_a_worker_that_joins_late_gets_the_models_without_a_build(fleet_: MiniFleet) -> None:
    await fleet_.build_and_start()
    first = fleet_.workers[0]
    fleet_.start_worker()
    first.kill()
    await fleet_.submit("u", [4], 5)
    assert list((await fleet_.result("u")).tokens) == expected_tokens([4], 5)


async def test_stop_waits_for_running_requests(fleet_: MiniFleet) -> None:
    fleet_.write_model(step_s=0.02)
    await fleet_.build_and_start()
    await fleet_.submit("u", [4], 20)
    stopping = asyncio.ensure_future(act(fleet_, "stop"))
    assert (await fleet_.result("u")).reason == "length"
    assert await stopping == RUNTIME


async def test_unload_is_denied_while_requests_live(fleet_: MiniFleet) -> None:
    fleet_.write_model(step_s=0.05)
    await fleet_.build_and_start()
    await fleet_.submit("u", [4], 400)
    assert await act(fleet_, "unload") == DENIED
    await fleet_.call(release_request=pb.StopRequestRequest(uuid="u"))
    assert await act(fleet_, "unload") == OK


async def test_swapping_that_was_disabled_stays_disabled(fleet_: MiniFleet) -> None:
    await act(fleet_, "build", swap_threshold=-1)
    assert await act(fleet_, "unload") == INVALID


async def test_tenants_own_what_they_built(fleet_: MiniFleet) -> None:
    async def rank_nums(tenant: str) -> int:
        return (await fleet_.call(tenant=tenant, get_rank_nums=pb.Empty())).rank_nums.rank_id

    config = pb.ModelStructConfig(model_name="m", model_path="m.json")
    for tenant in ("a", "b"):
        assert await rank_nums(tenant) == 0
        assert (await fleet_.call(tenant=tenant, build_model=config)).as_status == 0
        assert await rank_nums(tenant) == 1
    await fleet_.call(tenant="a", shutdown_service=pb.Empty())
    assert (await rank_nums("a"), await rank_nums("b")) == (0, 1)
    await fleet_.call(tenant="b", shutdown_service=pb.Empty())
    assert await act(fleet_, "start") == INVALID, "the last owner took the model with it"


async def test_statistics_information_and_profile(fleet_: MiniFleet) -> None:
    unknown = await fleet_.call(get_engine_stat=pb.ModelName(model_name="nobody"))
    assert unknown.engine_stat == pb.AsEngineStat(model_name="nobody")
    info = await fleet_.call(get_model_information=pb.ModelName(model_name="m"))
    assert info.model_information.model_info == ""
    await fleet_.build_and_start()
    info = await fleet_.call(get_model_information=pb.ModelName(model_name="m"))
    assert info.model_information.model_info == (
        "Model Type : scripted\nModel Inputs : \n"
        "    { name: input_ids, device: CPU, dtype: INT64, shape: [0, 0], addr: (nil), val: (null) }\n"
        "    { name: attention_mask, device: CPU, dtype: INT64, shape: [0, 0], addr: (nil), val: (null) }\n"
        "Model Outputs:\n"
        "    { name: generated_ids, device: CPU, dtype: INT64, shape: [0, 0], addr: (nil), val: (null) }\n"
    )
    await fleet_.submit("u", [4], 20)
    await fleet_.result("u")
    fleet_.start_worker()
    while (await fleet_.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status.models[0].workers < 2:
        await asyncio.sleep(0.02)  # polling: the second worker loads at its own pace
    stat = (await fleet_.call(get_engine_stat=pb.ModelName(model_name="m"))).engine_stat
    assert (stat.total_span, stat.span_size, stat.total_generated_token) == (2 * 4096, 512, 20)
    assert stat.used_span + stat.free_span == stat.total_span
    fleet_.workers[0].kill()
    while len((await fleet_.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status.workers) > 1:
        await asyncio.sleep(0.02)  # polling: until the broker has noticed
    stat = (await fleet_.call(get_engine_stat=pb.ModelName(model_name="m"))).engine_stat
    assert (stat.total_span, stat.total_generated_token) == (4096, 20), "counters survive their worker"
    profile = await fleet_.call(get_op_profiling_info=pb.ModelName(model_name="m"))
    assert profile.op_profiling_info.op_profiling_info == "", "profiling is off"
