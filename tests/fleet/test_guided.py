"""Documents on their way through broker and worker; the scripted engine itself does not follow them."""

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


async def test_a_document_that_no_compiler_takes_ends_in_a_terminal_record_beside_others(
    fleet_: MiniFleet,
) -> None:
    fleet_.start_worker("--max-grammar-bytes=1000")
    await fleet_.build_and_start()
    for uuid, kind, text in [
        ("fine", "regex", "[a-z]+"),
        ("broken", "regex", "(a"),
        ("long", "regex", "a" * 1001),
        ("type", "json_schema", '{"type":"objekt"}'),
    ]:
        assert (await submit(fleet_, guided(uuid, **{"type": kind, kind: text}))).as_status == 0
    refused = await submit(fleet_, guided("yaml", type="yaml"))
    assert (refused.as_status, "unknown type" in refused.reason) == (pb.ALLSPARK_PARAM_ERROR, True)
    fine = await fleet_.result("fine")
    assert (fine.reason, len(fine.tokens)) == ("length", 20)
    for uuid, said in [("broken", "unclosed"), ("long", "limit is 1000"), ("type", "objekt")]:
        ended = await fleet_.result(uuid)
        assert (ended.status, ended.reason, ended.tokens) == (4, "grammar", ()), uuid
        assert said in (await fleet_.streams.view(f"default/{uuid}")).message


async def test_a_request_that_is_stopped_while_its_document_compiles_leaves_nothing_behind(
    fleet_: MiniFleet,
) -> None:
    """The first document of a worker takes a moment: a child has to start."""
    worker = fleet_.start_worker()
    await fleet_.build_and_start()
    for uuid, text in [("bad", "(a"), ("good", "[a-z]+")]:
        assert (await submit(fleet_, guided(uuid, type="regex", regex=text))).as_status == 0
        assert (await fleet_.call(stop_request=pb.StopRequestRequest(uuid=uuid))).as_status == 0
    for uuid in ("good", "bad"):
        assert (await fleet_.result(uuid)).reason in ("stopped", "grammar")
    # What the worker still held would keep it until its limit for draining, 30 s.
    worker.signal(signal.SIGTERM)
    assert worker.popen.wait(15) == 0


async def test_a_vocabulary_is_recorded_only_where_something_reads_it(fleet_: MiniFleet) -> None:
    fleet_.start_worker("--max-queue=1")
    await fleet_.build_and_start()
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
