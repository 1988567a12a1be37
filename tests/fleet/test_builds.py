"""Builds: joined, withdrawn, all or nothing, several models, and brokers that die in between."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from allspark_bus.broker_client import BrokerClient
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from tests.fleet.harness import LIMIT_S, MiniFleet, request
from tests.fleet.scripted_engine import expected_tokens

OK, MEMORY, RUNTIME, INVALID, DENIED = 0, 4, 5, 8, 12
JOINABLE_S = 4.0  # a load that calls made at the same time find in progress, however busy the machine is
ENDLESS_S = 600.0


@pytest.fixture
async def fleet_(valkey, tmp_path: Path) -> AsyncIterator[MiniFleet]:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path)
    f.write_model()
    yield f
    await f.close()


async def build(f: MiniFleet, path: str, name: str = "m", **config: object) -> fleet.Reply:
    return await f.call(build_model=pb.ModelStructConfig(model_name=name, model_path=path, **config))


async def act(f: MiniFleet, action: str, name: str = "m") -> fleet.Reply:
    return await f.call(**{f"{action}_model": pb.ModelName(model_name=name)})


async def until(f: MiniFleet, predicate: Callable[[fleet.FleetStatus], bool]) -> fleet.FleetStatus:
    async with asyncio.timeout(LIMIT_S):
        while True:
            status = (await f.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status
            if predicate(status):
                return status
            await asyncio.sleep(0.02)  # polling: what workers report arrives at its own pace


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


async def test_identical_builds_load_once_and_share_the_answer(fleet_: MiniFleet) -> None:
    log = fleet_.directory / "loads"
    fleet_.write_model("bad.json", load_s=JOINABLE_S, fail="load", log=str(log))
    fleet_.start_worker()
    replies = await asyncio.gather(*[build(fleet_, "bad.json") for _ in range(4)])
    assert {(r.as_status, r.reason) for r in replies} == {(MEMORY, replies[0].reason)}
    assert "told to fail at load" in replies[0].reason
    assert lines(log) == 1
    fleet_.write_model("good.json", load_s=JOINABLE_S, log=str(log))
    replies = await asyncio.gather(*[build(fleet_, "good.json") for _ in range(4)])
    assert [r.as_status for r in replies] == [OK] * 4
    assert lines(log) == 2


async def test_a_build_that_fails_on_one_worker_leaves_nothing_on_any(fleet_: MiniFleet) -> None:
    """One loads it well, one would still be loading for minutes, one fails."""
    fleet_.write_model("m.json", load_s_of={"slow": ENDLESS_S}, fail_of={"bad": "load"})
    for name in ("good", "slow", "bad"):
        fleet_.start_worker(f"--name={name}")
    await until(fleet_, lambda s: len(s.workers) == 3)
    reply = await asyncio.wait_for(build(fleet_, "m.json"), LIMIT_S)
    assert reply.as_status == MEMORY
    assert reply.reason.startswith("worker bad-")
    status = (await fleet_.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status
    assert not status.models
    stat = (await fleet_.call(get_engine_stat=pb.ModelName(model_name="m"))).engine_stat
    assert stat == pb.AsEngineStat(model_name="m")
    assert await fleet_.store.command("KEYS", "as:model*") == []
    fleet_.write_model("other.json")
    assert (await build(fleet_, "other.json")).as_status == OK, "every worker is free again"


async def test_release_withdraws_a_build_in_progress(fleet_: MiniFleet) -> None:
    fleet_.write_model("slow.json", load_s=ENDLESS_S)
    fleet_.start_worker()
    building = asyncio.ensure_future(build(fleet_, "slow.json"))
    await until(fleet_, lambda s: bool(s.models) and s.models[0].progress > 0)
    assert (await build(fleet_, "m.json")).as_status == DENIED, "another configuration has to wait"
    assert (await act(fleet_, "start")).as_status == INVALID
    assert (await act(fleet_, "release")).as_status == OK
    reply = await asyncio.wait_for(building, LIMIT_S)
    assert (reply.as_status, "released" in reply.reason) == (DENIED, True)
    assert (await asyncio.wait_for(build(fleet_, "m.json"), LIMIT_S)).as_status == OK


async def test_a_slow_load_holds_up_no_other_model(fleet_: MiniFleet) -> None:
    fleet_.write_model("slow.json", load_s=ENDLESS_S)
    fleet_.start_worker()
    await fleet_.build_and_start("quick")
    building = asyncio.ensure_future(build(fleet_, "slow.json", "slow"))
    await until(fleet_, lambda s: any(m.name == "slow" and m.progress > 0 for m in s.models))
    await fleet_.submit("u", [4], 5, "quick")
    assert list((await fleet_.result("u")).tokens) == expected_tokens([4], 5)
    await fleet_.call(release_request=pb.StopRequestRequest(uuid="u"))
    for action in ("stop", "start", "unload", "reload", "release"):
        assert (await asyncio.wait_for(act(fleet_, action, "quick"), LIMIT_S)).as_status == OK, action
    assert not building.done()
    await act(fleet_, "release", "slow")
    await building


async def test_several_models_in_one_worker_serve_their_own_requests(fleet_: MiniFleet) -> None:
    fleet_.write_model("b.json", vocab=50)
    fleet_.start_worker()
    fleet_.start_worker()
    await fleet_.build_and_start("a")
    await fleet_.build_and_start("b", "b.json")
    for i in range(20):
        assert (await fleet_.submit(f"u{i}", [7], 30, "ab"[i % 2])).as_status == OK
    results = [list((await fleet_.result(f"u{i}")).tokens) for i in range(20)]
    assert results[0::2] == [expected_tokens([7], 30)] * 10
    assert results[1::2] == [expected_tokens([7], 30)] * 10
    assert (await act(fleet_, "release", "a")).as_status == OK
    assert (await fleet_.submit("u", [7], 3, "b")).as_status == OK, "b does not notice that a is gone"
    assert len((await fleet_.result("u")).tokens) == 3


async def test_rebuild_when_built_and_when_stopped(fleet_: MiniFleet) -> None:
    fleet_.start_worker()
    for batch, actions in ((3, ("build",)), (4, ("start", "stop", "build")), (5, ("start",))):
        for action in actions:
            reply = await (
                build(fleet_, "m.json", engine_max_batch=batch) if action == "build" else act(fleet_, action)
            )
            assert reply.as_status == OK, (action, reply.reason)
    status = await until(fleet_, lambda s: bool(s.workers) and s.workers[0].capacity > 0)
    assert status.workers[0].capacity == 4 + 4, "max_batch of the second rebuild, and the queue ahead"


async def test_a_model_that_cannot_move_stays_where_it_is(fleet_: MiniFleet) -> None:
    fleet_.start_worker()
    fleet_.write_model("m.json", fail="unload")
    await fleet_.build_and_start()
    reply = await act(fleet_, "unload")
    assert (reply.as_status, "told to fail at unload" in reply.reason) == (3, True)
    await fleet_.submit("u", [4], 5)
    assert (await fleet_.result("u")).reason == "length", "it runs again"

    fleet_.write_model("n.json", fail="reload")
    await fleet_.build_and_start("n", "n.json")
    assert (await act(fleet_, "unload", "n")).as_status == OK
    assert (await act(fleet_, "reload", "n")).as_status == MEMORY
    assert (await act(fleet_, "start", "n")).as_status == INVALID, "still unloaded"


async def test_stop_ends_what_outlives_the_drain_limit(valkey, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path, "--drain-s=0.4")
    try:
        f.write_model(step_s=0.05, max_batch=1, max_length=8192)
        f.start_worker()
        await f.build_and_start()
        for uuid in ("runs", "waits"):
            await f.submit(uuid, [4], 8000)
        async with asyncio.timeout(LIMIT_S):
            assert (await act(f, "stop")).as_status == RUNTIME
        for uuid in ("runs", "waits"):
            batch = await f.result(uuid)
            assert (batch.status, batch.reason) == (pb.GenerateInterrupted, "model_stopped")
            assert "drain limit of 0.4 s" in batch.message
            await f.call(release_request=pb.StopRequestRequest(uuid=uuid))
        assert (await act(f, "start")).as_status == OK
        await until(f, lambda s: s.inflight_requests == 0)
        assert (await f.submit("u", [4], 3)).as_status == OK
        assert (await f.result("u")).reason == "length"
    finally:
        await f.close()


async def test_a_broker_that_dies_while_it_drains_is_taken_over(valkey, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path, "--drain-s=5")  # so long do we have to find it draining, each time
    try:
        f.write_model(step_s=0.05, max_length=8192)
        f.start_worker()
        await f.build_and_start()
        await f.submit("u", [4], 8000)
        assert f.broker is not None
        call = fleet.Envelope(stop_model=pb.ModelName(model_name="m"))
        stopping = asyncio.ensure_future(f.client.call(call, 30.0))
        async with asyncio.timeout(LIMIT_S):
            while await f.store.command("HGET", "as:model:m", "state") != b"stopping":
                await asyncio.sleep(0.005)  # polling: until the broker has begun to drain
        f.broker.kill()
        stopping.cancel()
        f.start_broker()
        assert (await act(f, "start")).as_status == DENIED
        await until(f, lambda s: bool(s.models) and s.models[0].state == "stopped")
        assert (await f.result("u")).reason == "model_stopped"
        assert (await act(f, "start")).as_status == OK
    finally:
        await f.close()


async def test_a_long_build_stays_with_its_broker(fleet_: MiniFleet) -> None:
    """A broker that works on a call says so: it is not sent to the others in turn."""
    fleet_.write_model("slow.json", load_s=2.5)
    fleet_.start_worker()
    client = BrokerClient([fleet_.frontend, "tcp://127.0.0.1:9"])
    sent: list[str] = []
    for peer in client._peers:
        original = peer.socket.send_multipart

        async def spy(frames, flags=0, *, to=peer.endpoint, original=original):  # type: ignore[no-untyped-def]
            await original(frames, flags=flags)  # raises where nobody listens
            sent.append(to)

        peer.socket.send_multipart = spy  # type: ignore[method-assign]
    try:
        config = pb.ModelStructConfig(model_name="m", model_path="slow.json")
        reply = await client.call(fleet.Envelope(build_model=config), LIMIT_S)
        assert reply.as_status == OK
        assert set(sent) == {fleet_.frontend}
    finally:
        await client.close()


async def test_a_broker_without_its_store_says_that_nothing_was_decided(valkey, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path)
    try:
        f.write_model()
        f.start_worker()
        await f.build_and_start()
        valkey.kill()
        reply = await f.client.call(fleet.Envelope(start_request=request("u", [1], 3, "m")), LIMIT_S)
        assert reply.unavailable
        assert reply.retry_after_ms > 0
        assert "Redis is unreachable" in reply.reason
        valkey.start()
        assert (await f.submit("u", [1], 3)).as_status == OK
    finally:
        await f.close()
