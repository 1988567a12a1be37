"""Broker and workers as real processes with the scripted engine: dispatch, fencing, recovery."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from tests.fleet.harness import LIMIT_S, MiniFleet, polled, request
from tests.fleet.scripted_engine import expected_tokens


@pytest.fixture
async def fleet_(valkey, tmp_path: Path) -> AsyncIterator[MiniFleet]:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path)
    yield f
    await f.close()


async def test_a_request_runs_to_its_end(fleet_: MiniFleet) -> None:
    fleet_.write_model()
    fleet_.start_worker()
    await fleet_.build_and_start()
    assert (await fleet_.submit("u", [5, 6, 7], 20)).as_status == 0
    batch = await fleet_.result("u")
    assert list(batch.tokens) == expected_tokens([5, 6, 7], 20)
    assert (batch.status, batch.reason) == (pb.GenerateFinished, "length")


async def test_a_killed_workers_requests_continue_elsewhere(fleet_: MiniFleet) -> None:
    fleet_.write_model(step_s=0.02)
    fleet_.start_worker()
    await fleet_.build_and_start()
    prompts = {f"u{i}": [i + 1, 2, 3] for i in range(6)}
    for uuid, prompt in prompts.items():
        assert (await fleet_.submit(uuid, prompt, 60)).as_status == 0
    await fleet_.generated("u0", 5)
    fleet_.workers[0].kill()
    fleet_.start_worker()
    for uuid, prompt in prompts.items():
        batch = await fleet_.result(uuid)
        assert list(batch.tokens) == expected_tokens(prompt, 60), uuid
        assert batch.reason == "length"


async def test_a_zombie_that_wakes_up_appends_nothing(fleet_: MiniFleet) -> None:
    gate = fleet_.directory / "the-zombie-has-lost-it"
    fleet_.write_model(step_s=0.02, gate=str(gate), gate_at=10)
    zombie = fleet_.start_worker()
    await fleet_.build_and_start()
    await fleet_.submit("u", [9, 9], 60)
    await fleet_.generated("u", 5)
    before = await fleet_.ledger.load("default/u")
    zombie.signal(signal.SIGSTOP)
    fleet_.start_worker()

    async def dispatched_again() -> bool:
        entry = await fleet_.ledger.load("default/u")
        return entry.epoch >= before.epoch + 2  # claimed, then dispatched

    await polled(dispatched_again)
    zombie.signal(signal.SIGCONT)
    gate.touch()
    batch = await fleet_.result("u")
    assert list(batch.tokens) == expected_tokens([9, 9], 60)


async def test_a_zombie_appends_nothing_to_the_next_request_of_its_uuid_when_no_tombstone_is_left(
    fleet_: MiniFleet,
) -> None:
    """Other tokens at the same positions: only the epoch tells the two requests apart."""
    fleet_.write_model(step_s=0.02)
    zombie = fleet_.start_worker()
    await fleet_.build_and_start()
    await fleet_.submit("u", [9, 9], 400)
    await fleet_.generated("u", 3)
    zombie.signal(signal.SIGSTOP)
    assert (await fleet_.call(release_request=pb.StopRequestRequest(uuid="u"))).as_status == 0
    await fleet_.store.command("DEL", keys.request("default/u"))  # what time does to a tombstone
    fleet_.start_worker()
    assert (await fleet_.submit("u", [1, 2], 100)).as_status == 0
    zombie.signal(signal.SIGCONT)
    batch = await fleet_.result("u")
    assert list(batch.tokens) == expected_tokens([1, 2], 100)


async def test_a_restarted_broker_loses_no_request(fleet_: MiniFleet) -> None:
    fleet_.write_model(step_s=0.02, max_batch=2)
    fleet_.start_worker()
    await fleet_.build_and_start()
    prompts = {f"u{i}": [i + 1, 4] for i in range(12)}  # more than the worker takes: some wait in the broker
    for uuid, prompt in prompts.items():
        assert (await fleet_.submit(uuid, prompt, 30)).as_status == 0
    assert fleet_.broker is not None
    fleet_.broker.kill()
    fleet_.start_broker()
    for uuid, prompt in prompts.items():
        batch = await fleet_.result(uuid)
        assert list(batch.tokens) == expected_tokens(prompt, 30), uuid
    assert (await fleet_.submit("late", [1], 3)).as_status == 0, "the new broker knows the model"
    assert (await fleet_.result("late")).reason == "length"


async def test_a_request_that_kills_two_workers_is_quarantined(fleet_: MiniFleet) -> None:
    fleet_.write_model(poison=[666])
    fleet_.start_worker()
    fleet_.start_worker()
    await fleet_.build_and_start()
    await fleet_.submit("bad", [666, 1], 50)
    batch = await fleet_.result("bad")
    assert (batch.status, batch.reason) == (pb.GenerateInterrupted, "poison")
    fleet_.start_worker()
    await fleet_.submit("good", [1, 2], 5)
    assert list((await fleet_.result("good")).tokens) == expected_tokens([1, 2], 5)


async def test_sigterm_hands_requests_over_and_exits_cleanly(fleet_: MiniFleet) -> None:
    fleet_.write_model(step_s=0.05)
    old = fleet_.start_worker("--drain-s=0.2")
    await fleet_.build_and_start()
    prompts = {f"u{i}": [i + 1] for i in range(4)}
    for uuid, prompt in prompts.items():
        await fleet_.submit(uuid, prompt, 40)
    fleet_.start_worker()
    assert await asyncio.to_thread(old.terminate) == 0
    for uuid, prompt in prompts.items():
        batch = await fleet_.result(uuid)
        assert list(batch.tokens) == expected_tokens(prompt, 40)


async def test_stop_ends_waiting_and_running_requests_alike(fleet_: MiniFleet) -> None:
    fleet_.write_model(step_s=0.05, max_batch=1, max_length=8192)
    fleet_.start_worker()
    await fleet_.build_and_start()
    for uuid in ("a", "b", "c", "d", "e", "f", "g"):
        await fleet_.submit(uuid, [1, 2], 8000)  # far longer than anybody waits here
    for uuid in ("g", "a"):
        reply = await fleet_.call(stop_request=pb.StopRequestRequest(uuid=uuid))
        assert (reply.as_status, reply.uuid) == (0, uuid)
        view = await fleet_.streams.view(f"default/{uuid}")
        assert (view.status, view.reason) == (pb.GenerateFinished, "stopped")
    for uuid in "bcdef":
        assert (await fleet_.call(release_request=pb.StopRequestRequest(uuid=uuid))).as_status == 0
    await fleet_.submit("next", [3], 2)
    assert (await fleet_.result("next")).reason == "length", "the slots are free again"


async def test_redis_holds_nothing_after_release(fleet_: MiniFleet) -> None:
    fleet_.write_model()
    fleet_.start_worker()
    await fleet_.build_and_start()
    for i in range(20):
        await fleet_.submit(f"u{i}", [1, i], 10)
    for i in range(20):
        await fleet_.result(f"u{i}")
        await fleet_.call(release_request=pb.StopRequestRequest(uuid=f"u{i}"))
    tombstones = {keys.request(f"default/u{i}") for i in range(20)}

    async def only_models_are_left() -> bool:
        left = {k.decode() for k in await fleet_.store.command("KEYS", "as:*")}
        return left - tombstones == {keys.MODELS, keys.BROKERS, keys.model("m")}

    await polled(only_models_are_left)  # indexes follow
    for key in tombstones:
        assert (await fleet_.store.command("HGETALL", key))[:3] == [b"st", b"released", b"ep"]
        assert await fleet_.store.command("PTTL", key) > 0


async def test_a_deadline_ends_queued_and_running_requests(fleet_: MiniFleet) -> None:
    """One after its first token, those in the worker's queue, and those in the broker's."""
    gate = fleet_.directory / "goes-on"
    gate.touch()
    fleet_.write_model(step_s=0.005, max_batch=1, gate=str(gate), gate_at=1)
    fleet_.start_worker()
    await fleet_.build_and_start()
    await fleet_.submit("measured", [1], 20)  # how fast the model is decides what is accepted
    await fleet_.result("measured")
    gate.unlink()
    accepted = [await fleet_.accepted_with_deadline(request(uuid, [1], 2)) for uuid in "abcdefg"]
    for uuid in [r.config.uuid for r in accepted]:
        batch = await fleet_.result(uuid)
        assert (batch.status, batch.reason) == (pb.GenerateInterrupted, "deadline"), uuid


async def test_higher_priority_is_served_first(fleet_: MiniFleet) -> None:
    """By when they ended, not by the clock of the test."""
    fleet_.write_model(step_s=0.01, max_batch=1)
    worker = fleet_.start_worker()
    await fleet_.build_and_start()
    worker.kill()  # so that everybody waits before anybody is served
    for i in range(12):  # more than a worker takes, so that some wait in the broker
        await fleet_.submit(f"between{i}", [1, i], 5)
    for uuid, priority in (("low", -5), ("high", 5)):
        envelope = fleet.Envelope(start_request=request(uuid, [2], 2), priority=priority)
        assert (await fleet_.client.call(envelope, LIMIT_S)).as_status == 0
    fleet_.start_worker()
    ended_ms = []
    for uuid in ("high", "low"):
        await fleet_.result(uuid)
        ended_ms.append(int(await fleet_.store.command("HGET", keys.request(f"default/{uuid}"), "et")))
    assert ended_ms[0] < ended_ms[1]


async def test_an_empty_fleet_recovers_when_the_first_worker_arrives(fleet_: MiniFleet) -> None:
    fleet_.write_model()
    worker = fleet_.start_worker()
    await fleet_.build_and_start()
    worker.kill()
    assert (await fleet_.submit("u", [1, 2, 3], 5)).as_status == 0
    fleet_.start_worker()
    batch = await fleet_.result("u")
    assert list(batch.tokens) == expected_tokens([1, 2, 3], 5)


async def test_a_request_follows_its_prefix_to_the_busier_worker(fleet_: MiniFleet) -> None:
    fleet_.write_model(step_s=0.02)
    for _ in range(2):
        fleet_.start_worker()
    async with asyncio.timeout(LIMIT_S):
        while len((await fleet_.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status.workers) < 2:
            pass  # each round trip gives the broker its turn to hear the second worker
    await fleet_.build_and_start(enable_prefix_cache=True, prefix_cache_ttl=300)
    shared = list(range(1, 65))
    workers = {}
    for uuid, prompt in (("first", [*shared, 7]), ("same", [*shared, 8]), ("other", [9] * 65)):
        assert (await fleet_.submit(uuid, prompt, 400)).as_status == 0
        entry = await fleet_.ledger.load(f"default/{uuid}")
        assert entry is not None
        workers[uuid] = entry.worker
    assert workers["same"] == workers["first"] != workers["other"]
