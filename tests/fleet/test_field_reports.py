"""Faults that users of comparable systems reported, each as a test named after its symptom.

docs/field-reports.md lists all of them and the tests elsewhere that stand for the others.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from allspark_broker.links import WorkerLink
from allspark_bus import sockets
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_workers.main import EXIT_STALLED

from tests.fleet.harness import MiniFleet, Process, polled, request
from tests.fleet.scripted_engine import expected_tokens

PROMPT = [5, 6, 7]
DENIED = 12


@pytest.fixture
async def make_fleet(valkey: Any, tmp_path: Path) -> AsyncIterator[Callable[..., MiniFleet]]:
    """Makes the one fleet of a test, with flags for its broker."""
    made: list[MiniFleet] = []

    def make(*flags: str) -> MiniFleet:
        made.append(MiniFleet(valkey.url, tmp_path, *flags))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def result(fleet_: MiniFleet, uuid: str) -> tuple[list[int], str]:
    """Tokens and reason of a request that ends."""
    batch = await fleet_.result(uuid)
    return list(batch.tokens), batch.reason


async def until_exits(workers: list[Process], wanted: list[int]) -> None:
    """Until so many have ended, like this (a process is heard no more a moment before it has)."""

    async def have_ended() -> bool:
        return len([w for w in workers if w.popen.poll() is not None]) >= len(wanted)

    await polled(have_ended)
    assert [w.popen.poll() for w in workers if w.popen.poll() is not None] == wanted


async def generated(fleet_: MiniFleet) -> int:
    reply = await fleet_.call(get_engine_stat=pb.ModelName(model_name="m"))
    return int(reply.engine_stat.total_generated_token)


async def test_engine_frozen_while_health_stays_green(make_fleet: Callable[..., MiniFleet]) -> None:
    """Heartbeats go on, steps do not: the worker gives up and its request continues on another."""
    f = make_fleet()
    f.write_model(freeze_once=[666])
    workers = [f.start_worker("--stall-s=5") for _ in range(2)]
    await f.build_and_start()
    await f.submit("frozen", [666, 1], 30)
    assert await result(f, "frozen") == (expected_tokens([666, 1], 30), "length")
    await until_exits(workers, [EXIT_STALLED])


async def test_scheduler_admits_nothing_for_good_while_memory_is_free(
    make_fleet: Callable[..., MiniFleet],
) -> None:
    """The engine claims to have nothing to do while a request waits: the worker exits; the request, which
    does this to two workers, is quarantined; others are served."""
    f = make_fleet()
    f.write_model(overlooked=[666])
    workers = [f.start_worker("--stall-s=5") for _ in range(3)]
    await f.build_and_start()
    await f.submit("overlooked", [666, 1], 30)
    assert await result(f, "overlooked") == ([], "poison")
    await until_exits(workers, [EXIT_STALLED] * 2)
    await f.submit("good", PROMPT, 5)
    assert await result(f, "good") == (expected_tokens(PROMPT, 5), "length")


async def test_client_leaves_mid_turn_and_decode_goes_on_to_the_limit(
    make_fleet: Callable[..., MiniFleet],
) -> None:
    """What happens then is the request's own choice: with a deadline it ends there, without one it runs to
    its end for whoever asks later. Both leave nothing behind."""
    f = make_fleet()
    f.write_model(step_s=0.02, max_length=4096)
    f.start_worker()
    await f.build_and_start()
    await f.submit("durable", PROMPT, 30)
    bounded = (await f.accepted_with_deadline(request("bounded", PROMPT, 4000))).config.uuid
    tokens, reason = await result(f, bounded)
    assert reason == "deadline" and len(tokens) < 4000
    assert await result(f, "durable") == (expected_tokens(PROMPT, 30), "length")
    for uuid in (bounded, "durable"):
        assert (await f.call(release_request=pb.StopRequestRequest(uuid=uuid))).as_status == 0
    reply = await f.call(get_engine_stat=pb.ModelName(model_name="m"))
    assert (reply.engine_stat.used_span, reply.engine_stat.running_request) == (0, 0)


async def test_cancel_is_answered_but_the_slot_burns_on(make_fleet: Callable[..., MiniFleet]) -> None:
    """The work stops, not only the answer: the worker's token counter comes to rest and its slot is free."""
    f = make_fleet()
    f.write_model(step_s=0.02, max_length=4096, max_batch=1)
    f.start_worker()
    await f.build_and_start()
    await f.submit("gone", PROMPT, 4000)
    async with f.wakeups.watch("default/gone") as event:
        await event.wait()
    assert (await f.call(release_request=pb.StopRequestRequest(uuid="gone"))).as_status == 0
    await f.submit("next", [8], 3)
    assert await result(f, "next") == (expected_tokens([8], 3), "length")
    before = await generated(f)
    await f.submit("probe", [9], 5)
    assert await result(f, "probe") == (expected_tokens([9], 5), "length")
    assert await generated(f) == before + 5, "nothing else was computed meanwhile"


async def test_requests_hang_after_routing_to_a_worker_without_a_handler(
    make_fleet: Callable[..., MiniFleet],
) -> None:
    """A worker that swallows dispatches: what it does not acknowledge goes to another, nothing is lost."""
    f = make_fleet("--ack-timeout-s=0.5", "--worker-timeout-s=60")
    f.write_model()
    workers = [f.start_worker() for _ in range(2)]
    await f.build_and_start()
    workers[0].signal(signal.SIGSTOP)  # connected, silent, and alive as far as the broker knows
    uuids = [f"u{i}" for i in range(12)]
    for uuid in uuids:
        assert (await f.submit(uuid, PROMPT, 4)).as_status == 0
    for uuid in uuids:
        assert await result(f, uuid) == (expected_tokens(PROMPT, 4), "length"), uuid
    status = (await f.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status
    assert (status.accepted_total, status.queued_requests) == (12, 0)

    async def all_have_ended() -> bool:
        return await f.ledger.num_open("m") == 0

    await polled(all_have_ended)  # accepted = ended; the index follows


async def test_router_drops_at_its_high_water_mark_and_reports_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full or missing peer is told to the sender, who keeps the message; what was sent arrives."""
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 20)
    context = zmq.asyncio.Context()
    socket, endpoint = sockets.router(context, "tcp://127.0.0.1:0")
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.IDENTITY, b"w")
    peer.setsockopt(zmq.RCVHWM, 1)
    try:
        link = WorkerLink(socket, "b")
        big = fleet.ToWorker(cancel=fleet.Cancel(request_id="x" * 100_000))
        assert not await link.send("w", big), "not connected"
        peer.connect(endpoint)
        await peer.send(b"hello")
        await socket.recv_multipart()
        sent = 0
        while await link.send("w", big):
            sent += 1
            assert sent < 2000, "it is never full"
        received = 0
        while received < sent:
            await asyncio.wait_for(peer.recv_multipart(), 60)
            received += 1
    finally:
        context.destroy(linger=0)


async def test_pending_count_grows_until_memory_ends(make_fleet: Callable[..., MiniFleet]) -> None:
    """The queue is bounded: one more is denied with a hint when to try again, and later accepted."""
    f = make_fleet("--max-queue=6")
    f.write_model(step_s=0.05, max_batch=1)
    f.start_worker()
    await f.build_and_start()
    accepted: list[str] = []
    for i in range(60):
        reply = await f.submit(f"u{i}", [1 + i], 400)
        if reply.as_status == DENIED:
            break
        accepted.append(f"u{i}")
    assert reply.as_status == DENIED
    assert reply.retry_after_ms > 0 and "waiting already" in reply.reason
    assert len(accepted) <= 6 + 5 + 1, "queue, and what the worker takes ahead"
    for uuid in accepted:
        assert (await f.call(release_request=pb.StopRequestRequest(uuid=uuid))).as_status == 0
    assert (await f.submit("later", PROMPT, 2)).as_status == 0
    assert await result(f, "later") == (expected_tokens(PROMPT, 2), "length")


async def test_store_is_killed_by_results_that_nobody_reads(
    make_fleet: Callable[..., MiniFleet], valkey: Any
) -> None:
    """A store at its memory limit denies new requests with the reason; room that is made is used again."""
    f = make_fleet()
    f.write_model()
    f.start_worker()
    await f.build_and_start()
    await f.submit("kept", PROMPT, 400)
    assert (await result(f, "kept"))[1] == "length"
    used = int(dict(_info(await f.store.command("INFO", "memory")))["used_memory"])
    await f.store.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await f.store.command("CONFIG", "SET", "maxmemory", str(used - 1))
    reply = await f.submit("denied", PROMPT, 4)
    assert reply.as_status != 0 and reply.reason
    await f.store.command("CONFIG", "SET", "maxmemory", "0")
    assert (await result(f, "kept"))[0] == expected_tokens(PROMPT, 400), "what was promised is there"
    assert (await f.submit("again", PROMPT, 4)).as_status == 0
    assert await result(f, "again") == (expected_tokens(PROMPT, 4), "length")


def _info(text: Any) -> list[tuple[str, str]]:
    if isinstance(text, dict):
        return [(k if isinstance(k, str) else k.decode(), str(v)) for k, v in text.items()]
    lines = text.decode().splitlines()
    return [(k, v) for k, _, v in (line.partition(":") for line in lines) if v]
