"""Tenants at a real broker through the ZeroMQ door: limits, shares, and what the status tells of them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_bus.watched import LOOK_AGAIN_S
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from tests.conftest import ValkeyProcess

from .harness import MiniFleet, request

LIMIT_S = 60.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenant.small]\nmax_requests = 2\nmax_tokens = 1000\n")
    return path


@pytest.fixture
async def fleet_(valkey: ValkeyProcess, tmp_path: Path, file: Path) -> AsyncIterator[MiniFleet]:
    f = MiniFleet(valkey.url, tmp_path, f"--tenants={file}")
    yield f
    await f.close()


async def submit(
    f: MiniFleet, tenant: str, uuid: str, new: int, priority: int = 0, prompt: int = 1
) -> fleet.Reply:
    envelope = fleet.Envelope(tenant=tenant, start_request=request(uuid, [prompt], new), priority=priority)
    return await f.client.call(envelope, 20)


async def until_accepted(f: MiniFleet, tenant: str, uuid: str, new: int) -> None:
    """As a client does that was told to come back."""
    async with asyncio.timeout(LIMIT_S):
        while (reply := await submit(f, tenant, uuid, new)).as_status:
            assert reply.as_status == pb.ALLSPARK_REQUEST_DENIED, reply.reason
            await asyncio.sleep(reply.retry_after_ms / 1000)


async def tenants(f: MiniFleet) -> dict[str, fleet.TenantStatus]:
    reply = await f.call(get_fleet_status=fleet.GetFleetStatus(with_tenants=True))
    return {row.name: row for row in reply.fleet_status.tenants}


async def test_a_tenant_at_its_limit_is_denied_and_others_are_not(fleet_: MiniFleet) -> None:
    fleet_.write_model(overlooked=[666])  # such requests never end
    fleet_.start_worker("--stall-s=600")
    await fleet_.build_and_start()
    for uuid in ("u1", "u2"):
        assert (await submit(fleet_, "small", uuid, 9, prompt=666)).as_status == 0
    denied = await submit(fleet_, "small", "u3", 9)
    assert denied.as_status == pb.ALLSPARK_REQUEST_DENIED
    assert "2 requests are open, and max_requests is 2" in denied.reason
    assert denied.retry_after_ms > 0 and not denied.full_for_ms
    assert (await submit(fleet_, "small", "u1", 9, prompt=666)).as_status == 0, "a retry is answered again"
    for n in range(5):
        assert (await submit(fleet_, "large", f"u{n}", 9)).as_status == 0
    row = (await tenants(fleet_))["small"]
    assert (row.open_requests, row.open_tokens, row.max_requests, row.max_tokens) == (2, 20, 2, 1000)
    assert (row.inflight_requests, row.weight) == (2, 1.0)

    assert fleet_.broker is not None
    fleet_.broker.kill()
    fleet_.start_broker()
    denied = await submit(fleet_, "small", "u3", 9)
    assert denied.as_status == pb.ALLSPARK_REQUEST_DENIED and "max_requests" in denied.reason, (
        "another broker counts the same"
    )
    stop = pb.StopRequestRequest(uuid="u1")
    assert (await fleet_.call(tenant="small", stop_request=stop)).as_status == 0
    assert (await submit(fleet_, "small", "u3", 9)).as_status == 0


async def test_limits_are_free_again_whoever_ends_a_request(fleet_: MiniFleet) -> None:
    fleet_.write_model()
    fleet_.start_worker()
    await fleet_.build_and_start()
    for n in range(8):
        await until_accepted(fleet_, "small", f"u{n}", 400)
    for n in range(8):
        assert (await asyncio.wait_for(fleet_.result(f"u{n}", "small"), LIMIT_S)).reason == "length"
        release = pb.StopRequestRequest(uuid=f"u{n}")
        assert (await fleet_.call(tenant="small", release_request=release)).as_status == 0
    async with asyncio.timeout(LIMIT_S):  # the last word of the worker may be on its way
        while (await tenants(fleet_))["small"].open_requests:
            await asyncio.sleep(0.01)
    assert await fleet_.store.command("EXISTS", keys.tenant_use("small")) == 0


async def test_a_changed_file_counts_without_a_restart(fleet_: MiniFleet, file: Path) -> None:
    fleet_.write_model(overlooked=[666])
    fleet_.start_worker("--stall-s=600")
    await fleet_.build_and_start()
    for n in range(3):
        assert (await submit(fleet_, "large", f"u{n}", 9, prompt=666)).as_status == 0
    new = file.with_suffix(".new")
    new.write_text("[others]\nmax_requests = 3\n[tenant.small]\nweight = 2\n")
    new.rename(file)
    async with asyncio.timeout(LIMIT_S):
        while (await tenants(fleet_))["small"].weight != 2:
            await asyncio.sleep(LOOK_AGAIN_S / 10)
        while (row := (await tenants(fleet_))["large"]).open_requests < 3:
            await asyncio.sleep(LOOK_AGAIN_S / 10)
    assert (row.open_requests, row.open_tokens, row.max_requests) == (3, 30, 3), "what was there before"
    assert (await submit(fleet_, "large", "more", 9)).as_status == pb.ALLSPARK_REQUEST_DENIED
    for n in range(3):
        assert (await submit(fleet_, "small", f"u{n}", 9)).as_status == 0


async def test_a_flood_of_one_tenant_does_not_keep_another_waiting(fleet_: MiniFleet) -> None:
    """Whatever priority the flood has; by when requests ended, not by the clock of the test."""
    fleet_.write_model(max_batch=1)
    worker = fleet_.start_worker()
    await fleet_.build_and_start()
    worker.kill()  # so that everybody waits before anybody is served
    for n in range(60):
        assert (await submit(fleet_, "flood", f"v{n}", 4, priority=100)).as_status == 0
    for n in range(3):
        assert (await submit(fleet_, "quiet", f"v{n}", 4, priority=-100)).as_status == 0
    fleet_.start_worker()
    for tenant, count in (("flood", 60), ("quiet", 3)):
        for n in range(count):
            await asyncio.wait_for(fleet_.result(f"v{n}", tenant), LIMIT_S)
    ended = [await ended_ms(fleet_, f"flood/v{n}") for n in range(60)]
    last = max([await ended_ms(fleet_, f"quiet/v{n}") for n in range(3)])
    assert sum(end < last for end in ended) < 30, "it had every other turn"


async def ended_ms(f: MiniFleet, rid: str) -> int:
    return int(await f.store.command("HGET", keys.request(rid), "et"))


async def test_a_full_queue_still_has_places_for_another_tenant(
    valkey: ValkeyProcess, tmp_path: Path
) -> None:
    f = MiniFleet(valkey.url, tmp_path, "--max-queue=8")
    try:
        f.write_model(max_batch=1)
        worker = f.start_worker()
        await f.build_and_start()
        worker.kill()
        outcomes = [(await submit(f, "flood", f"u{n}", 4)).as_status for n in range(40)]
        denied = [status == pb.ALLSPARK_REQUEST_DENIED for status in outcomes]
        assert denied == sorted(denied) and any(denied), "once it is full it stays full"
        for n in range(4):
            assert (await submit(f, "quiet", f"u{n}", 4)).as_status == 0
        assert (await submit(f, "quiet", "more", 4)).as_status == pb.ALLSPARK_REQUEST_DENIED, "half of eight"
        f.start_worker()
        for n in range(4):
            assert (await asyncio.wait_for(f.result(f"u{n}", "quiet"), LIMIT_S)).reason == "length"
        for n in range(denied.index(True)):
            assert (await asyncio.wait_for(f.result(f"u{n}", "flood"), LIMIT_S)).reason == "length"
    finally:
        await f.close()
