"""More than a fleet can serve: exact bounds, denials with a hint, deadlines that are kept or told early."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from allspark_bus import keys
from allspark_bus.ledger import now_ms
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_workers.hosted import QUEUE_AHEAD

from tests.fleet.harness import LIMIT_S, MiniFleet, polled, request
from tests.fleet.scripted_engine import expected_tokens

STUCK = 666
"""First token of a prompt that its worker takes and never begins."""
MAX_BATCH = 1
CAPACITY = MAX_BATCH + QUEUE_AHEAD


@pytest.fixture
async def make_fleet(valkey: Any, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes the one fleet of a test, one worker, model m running."""
    made: list[MiniFleet] = []

    async def make(*flags: str, **model: Any) -> MiniFleet:
        made.append(MiniFleet(valkey.url, tmp_path, *flags))
        made[-1].write_model(max_batch=MAX_BATCH, overlooked=[STUCK], **model)
        made[-1].start_worker()  # never exits because of what is stuck
        await made[-1].build_and_start()
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def start(f: MiniFleet, uuid: str, prompt: list[int], new: int, deadline_in_ms: int = 0) -> fleet.Reply:
    deadline_ms = now_ms() + deadline_in_ms if deadline_in_ms else 0
    envelope = fleet.Envelope(start_request=request(uuid, prompt, new), deadline_unix_ms=deadline_ms)
    return await f.client.call(envelope, LIMIT_S)


async def release(f: MiniFleet, uuids: list[str]) -> None:
    calls = [f.call(release_request=pb.StopRequestRequest(uuid=uuid)) for uuid in uuids]
    assert not any(reply.as_status for reply in await asyncio.gather(*calls))


async def counts(f: MiniFleet) -> fleet.FleetStatus:
    return (await f.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status


async def test_a_burst_never_gets_more_places_than_there_are(make_fleet: Callable[..., Any]) -> None:
    """All at once: those that are just being recorded count, and who is denied is told when to come back."""
    f = await make_fleet("--max-queue=20")
    replies = await asyncio.gather(*[start(f, f"u{n}", [STUCK], 4) for n in range(300)])
    accepted = [r.uuid for r in replies if not r.as_status]
    denied = [r for r in replies if r.as_status]
    assert len(accepted) == CAPACITY + 20
    assert all(r.as_status == pb.ALLSPARK_REQUEST_DENIED and r.retry_after_ms > 0 for r in denied)
    status = await counts(f)
    # What a worker is slow to acknowledge is taken back, and a call that is slow to be answered sent again.
    assert status.queued_requests + status.inflight_requests == CAPACITY + 20
    assert status.accepted_total == CAPACITY + 20 and status.denied_total >= 300 - CAPACITY - 20
    again = await start(f, accepted[-1], [STUCK], 4)
    assert again.as_status == 0, "a retry of what was accepted is no new request"
    await release(f, accepted)
    assert (await start(f, "later", [5], 3)).as_status == 0
    assert list((await f.result("later")).tokens) == expected_tokens([5], 3)


async def measure(f: MiniFleet) -> None:
    """Until the broker knows how fast the model is: then it takes what has a deadline and has to wait."""
    assert (await start(f, "measured", [3], 20)).as_status == 0
    assert list((await f.result("measured")).tokens) == expected_tokens([3], 20)
    stuck = [f"stuck{n}" for n in range(CAPACITY)]
    assert not any(r.as_status for r in await asyncio.gather(*[start(f, u, [STUCK], 1) for u in stuck]))
    deadline_s = time.monotonic() + LIMIT_S
    while (reply := await start(f, "probe", [5], 1, deadline_in_ms=60_000)).as_status:
        assert "not known yet" in reply.reason, reply.reason
        assert time.monotonic() < deadline_s, "no worker told how fast it is"
        await asyncio.sleep(0.05)
    await release(f, [*stuck, "probe", "measured"])


async def test_before_anything_ran_nothing_is_promised_to_who_would_wait(
    make_fleet: Callable[..., Any],
) -> None:
    """The batch is full: those after it wait without a deadline, or hear that it is not known how long."""
    f = await make_fleet()
    assert (await start(f, "first", [STUCK], 4, deadline_in_ms=3_600_000)).as_status == 0
    denied = await start(f, "second", [STUCK], 4, deadline_in_ms=3_600_000)
    assert denied.as_status == pb.ALLSPARK_REQUEST_DENIED and denied.retry_after_ms > 0
    assert "not known yet" in denied.reason
    assert (await start(f, "third", [STUCK], 4)).as_status == 0
    await release(f, ["first", "third"])


async def test_what_expires_in_the_queue_ends_as_deadline_and_reaches_no_engine(
    make_fleet: Callable[..., Any],
) -> None:
    f = await make_fleet()
    await measure(f)
    for n in range(CAPACITY):
        assert (await start(f, f"first{n}", [STUCK], 4)).as_status == 0
    kept: list[str] = []
    for deadline_ms in (2000, 8000, 32_000):  # on a busy machine some come too late, or all
        uuids = [f"u{deadline_ms}-{n}" for n in range(200)]
        replies = await asyncio.gather(*[start(f, uuid, [7], 4, deadline_ms) for uuid in uuids])
        kept += [r.uuid for r in replies if not r.as_status]
        if kept:
            break
    assert kept
    for uuid in kept:
        batch = await f.result(uuid)
        assert (batch.status, batch.reason) == (pb.GenerateInterrupted, "deadline")
        assert not batch.tokens
        worker = await f.store.command("HGET", keys.request(f"default/{uuid}"), "wk")
        assert worker == b"", "it never had one"

    async def none_waits() -> bool:
        return (await counts(f)).queued_requests == 0

    await polled(none_waits)


async def test_a_deadline_that_the_queue_cannot_keep_is_denied(make_fleet: Callable[..., Any]) -> None:
    """Far more work waits than the deadline allows."""
    f = await make_fleet(step_s=0.005)
    await measure(f)
    long = [f"long{n}" for n in range(60)]
    assert not any(r.as_status for r in await asyncio.gather(*[start(f, u, [4], 400) for u in long]))
    denied = await start(f, "soon", [5], 10, deadline_in_ms=20_000)
    assert denied.as_status == pb.ALLSPARK_REQUEST_DENIED, denied.reason
    assert "after its deadline" in denied.reason and denied.retry_after_ms > 0
    assert denied.full_for_ms == 0, "it says nothing about others"
    assert (await start(f, "late", [5], 10, deadline_in_ms=36_000_000)).as_status == 0
    await release(f, long)
    assert list((await f.result("late")).tokens) == expected_tokens([5], 10)
