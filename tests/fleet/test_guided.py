"""Documents on their way through broker and worker; the scripted engine itself does not follow them."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from tests.conftest import ValkeyProcess
from tests.fleet.harness import MiniFleet, request

VOCAB = {chr(c): c for c in range(32, 127)}


@pytest.fixture
async def fleet_(valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[MiniFleet]:
    f = MiniFleet(valkey.url, tmp_path)
    f.write_model(step_s=0.005)
    yield f
    await f.close()


def guided(uuid: str, vocab: dict[str, int] | None = None, **response_format: str) -> pb.StartRequestRequest:
    r = request(uuid, [8, 9], 20)
    r.config.vocab.update(VOCAB if vocab is None else vocab)
    r.config.response_format.update(response_format)
    return r


async def submit(f: MiniFleet, r: pb.StartRequestRequest) -> fleet.Reply:
    return await f.call(start_request=r)


async def refusal(f: MiniFleet, uuid: str, **response_format: str) -> fleet.Reply:
    """The answer to a document; what a busy worker compiles too slowly is let through: once more then."""
    for i in range(20):
        reply = await submit(f, guided(f"{uuid}{i}", **response_format))
        if reply.as_status:
            break
        assert (await f.result(reply.uuid)).reason == "grammar"
    return reply


BAD = [
    ("broken", "regex", "(a", "unclosed"),
    ("long", "regex", "a" * 1001, "limit is 1000"),
    ("type", "json_schema", '{"type":"objekt"}', "objekt"),
]


async def test_a_document_that_no_compiler_takes_is_refused_beside_others(fleet_: MiniFleet) -> None:
    fleet_.start_worker("--max-grammar-bytes=1000")
    await fleet_.build_and_start()
    assert (await submit(fleet_, guided("fine", type="regex", regex="[a-z]+"))).as_status == 0
    for uuid, kind, text, said in [*BAD, ("yaml", "yaml", "", "unknown type")]:
        refused = await refusal(fleet_, uuid, **{"type": kind, kind: text})
        assert (refused.as_status, said in refused.reason) == (pb.ALLSPARK_PARAM_ERROR, True), refused.reason
        assert (await fleet_.streams.view(f"default/{refused.uuid}")).outcome == "unknown"
    fine = await fleet_.result("fine")
    assert (fine.reason, len(fine.tokens)) == ("length", 20)


async def test_a_bad_document_that_no_worker_could_be_asked_about_ends_in_a_terminal_record(
    fleet_: MiniFleet,
) -> None:
    worker = fleet_.start_worker()
    await fleet_.build_and_start()
    worker.kill()
    while (await fleet_.call(get_fleet_status=fleet.GetFleetStatus())).fleet_status.workers:
        await asyncio.sleep(0.02)  # polling: until the broker has noticed
    for uuid, kind, text, _ in BAD:
        assert (await submit(fleet_, guided(uuid, **{"type": kind, kind: text}))).as_status == 0
    fleet_.start_worker("--max-grammar-bytes=1000")
    for uuid, _, _, said in BAD:
        ended = await fleet_.result(uuid)
        assert (ended.status, ended.reason, ended.tokens) == (4, "grammar", ()), uuid
        assert said in (await fleet_.streams.view(f"default/{uuid}")).message


async def test_a_request_that_is_stopped_while_its_document_compiles_leaves_nothing_behind(
    fleet_: MiniFleet,
) -> None:
    worker = fleet_.start_worker("--drain-s=600")
    await fleet_.build_and_start()
    for uuid, text in [("one", "[0-9]+"), ("two", "[a-z]+")]:
        assert (await submit(fleet_, guided(uuid, type="regex", regex=text))).as_status == 0
        assert (await fleet_.call(stop_request=pb.StopRequestRequest(uuid=uuid))).as_status == 0
        assert (await fleet_.result(uuid)).reason in ("stopped", "length")
    # What the worker still held would keep it until its limit for draining.
    assert await asyncio.to_thread(worker.terminate) == 0


async def test_a_vocabulary_is_recorded_only_where_something_reads_it(fleet_: MiniFleet) -> None:
    fleet_.start_worker("--max-queue=1")
    await fleet_.build_and_start()
    assert (await submit(fleet_, guided("before", type="json_object"))).as_status == 0
    await fleet_.result("before")
    fleet_.workers[0].signal(signal.SIGSTOP)  # nothing ends: the records stay open
    wanted = guided("wanted", type="json_object")
    for r in (guided("free"), guided("off", type="text"), wanted):
        assert (await submit(fleet_, r)).as_status == 0
    for uuid, size in [("free", 0), ("off", 0), ("wanted", len(VOCAB))]:
        body = await fleet_.store.command("HGET", keys.request(f"default/{uuid}"), "body")
        assert len(pb.StartRequestRequest.FromString(body).config.vocab) == size
    # A retry is the same request still, although its record differs.
    again = await submit(fleet_, guided("free"))
    assert (again.as_status, again.uuid) == (0, "free")
