"""Sections 1.4.10 to 1.4.12, 1.5 and 3.8: StopRequest, ReleaseRequest, SyncRequest; upstream's defects."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conformance.server import (
    FINISHED,
    ILLEGAL_ID,
    INTERRUPTED,
    LIMIT,
    OK,
    PARAM,
    Request,
    Server,
    request,
)
from tests.conformance.suite import add, case

PROMPT = [5, 6, 7]
ANSWER = ("StartRequestResponse.as_status", "StartRequestResponse.uuid")
NAMES = ("StopRequestRequest.model_name", "StopRequestRequest.uuid")


def _unknown(s: Server) -> Request:
    return Request(s, s.main, "conformance-never-seen")


for _rpc in ("StopRequest", "ReleaseRequest", "SyncRequest"):

    def _never_seen(s: Server, rpc: str = _rpc) -> None:
        answer = _unknown(s).end(rpc)
        assert (answer.as_status, answer.uuid) == (ILLEGAL_ID, "conformance-never-seen")

    def _too_long(s: Server, rpc: str = _rpc) -> None:
        uuid = "u" * 5000
        answer = Request(s, s.main, uuid).end(rpc)
        assert (answer.as_status, answer.uuid) == (ILLEGAL_ID, uuid)

    def _wrong_model(s: Server, rpc: str = _rpc) -> None:
        live = s.start(PROMPT)
        answer = live.end(rpc, model_name="conformance-another")
        assert (answer.as_status, answer.uuid) == (PARAM, live.uuid)
        assert len(live.take_all()) == 8

    def _no_model(s: Server, rpc: str = _rpc) -> None:
        live = s.start(PROMPT)
        answer = live.end(rpc, model_name="")
        assert (answer.as_status, answer.uuid) == (OK, live.uuid)
        assert live.release() == OK

    def _released(s: Server, rpc: str = _rpc) -> None:
        live = s.start(PROMPT)
        live.take_all()
        answer = live.end(rpc)
        assert (answer.as_status, answer.uuid) == (OK, live.uuid), "there is a tombstone"

    def _other_tenant(s: Server, rpc: str = _rpc) -> None:
        live = s.start(PROMPT, new=200)
        stranger = Request(s, s.main, live.uuid, s.needs_other_tenant())
        assert stranger.end(rpc).as_status == ILLEGAL_ID
        assert len(live.take_all()) == 200

    _number = {"StopRequest": "1.4.10", "ReleaseRequest": "1.4.11", "SyncRequest": "1.4.12"}[_rpc]
    add(_number, f"{_rpc} of a uuid that was never seen 10", (*ANSWER, *NAMES), _never_seen)
    add(_number, f"{_rpc} of a uuid longer than any 10", (*ANSWER, *NAMES), _too_long)
    add(_number, f"{_rpc} with another model 2", (*ANSWER, *NAMES), _wrong_model)
    add(_number, f"{_rpc} without a model 0", (*ANSWER, *NAMES), _no_model)
    add(_number, f"{_rpc} of a released uuid 0", (*ANSWER, *NAMES), _released)
    add(_number, f"{_rpc} of another tenant's uuid 10", (*ANSWER, *NAMES), _other_tenant)


for _rpc in ("StopRequest", "ReleaseRequest"):

    def _empty(s: Server, rpc: str = _rpc) -> None:
        live = s.start(PROMPT, new=200)
        answer = live.end(rpc, uuid="")
        assert (answer.as_status, answer.uuid) == (ILLEGAL_ID, "")
        assert len(live.take_all()) == 200, "an empty uuid never means all"

    add("3.8", f"{_rpc} with an empty uuid 10", (*ANSWER, *NAMES), _empty)


@case("1.4.10, 9 #10", *ANSWER, "GenerateRequestStatus.status", "GeneratedElements.ids_from_generate")
def StopRequest_while_generating_finishes_and_keeps_the_tokens(s: Server) -> None:
    live = s.start(PROMPT, max_length=s.long)
    head = list(live.get().ids_from_generate)
    assert (live.stop(), live.stop()) == (OK, OK)
    tail = live.drain()
    assert live.status() == FINISHED
    assert live.finish_reason() == "stopped"
    length = live.length()
    assert head and length == len(head) + len(tail) < s.long - 3
    assert head + tail == s.generate(PROMPT, new=length)
    assert live.release() == OK


@case("1.4.10", *ANSWER, "GenerateRequestStatus.status")
def StopRequest_of_one_that_waits_finishes_it_without_tokens(s: Server) -> None:
    with s.model(engine_max_batch=1, engine_max_length=s.long) as name:
        live = [s.start(PROMPT, model=name, max_length=s.long) for _ in range(12)]
        last = live[-1]
        assert last.status() == pb.Init
        assert last.stop() == OK
        assert last.status() == FINISHED
        assert (last.sync(), last.drain(), last.length()) == (OK, [], 0)
        assert [r.release() for r in live] == [OK] * 12


@case("1.4.10", *ANSWER)
def StopRequest_of_one_that_has_ended_0(s: Server) -> None:
    live = s.start(PROMPT)
    assert live.sync() == OK
    assert live.stop() == OK
    assert live.finish_reason() == "length", "it ended before"
    assert len(live.take_all()) == 8


@case("1.4.11", *ANSWER, "GeneratedElements.empty")
def ReleaseRequest_of_one_that_runs_stops_and_forgets_it(s: Server) -> None:
    live = s.start(PROMPT, max_length=s.long)
    live.get()
    assert (live.release(), live.release()) == (OK, OK)
    assert live.get().empty == 1
    while s.stat().running_request:
        pass


@case("1.4.11", "GeneratedElements.empty")
def ReleaseRequest_wakes_who_waits_in_Get(s: Server) -> None:
    with s.model(engine_max_batch=1, engine_max_length=s.long) as name:
        live = [s.start(PROMPT, model=name, max_length=s.long) for _ in range(12)]
        with s.later("Get", live[-1].key) as waiting:
            assert live[-1].release() == OK
            assert waiting.result().empty == 1
        assert [r.release() for r in live] == [OK] * 12


@case("1.4.12", *ANSWER)
def SyncRequest_of_a_live_request_returns_at_its_end(s: Server) -> None:
    live = s.start(PROMPT, new=500)
    assert live.sync() == OK
    assert live.status() == FINISHED
    assert live.sync() == OK, "it has ended, and is not released"
    assert len(live.take_all()) == 500


@case("1.4.12, 9 #9", *ANSWER, "StopRequestRequest.uuid")
def SyncRequest_without_a_uuid_waits_for_all_of_the_tenant(s: Server) -> None:
    live = [s.start([5 + i], new=300) for i in range(4)]
    answer = s.answer("SyncRequest", pb.StopRequestRequest(model_name=s.main))
    assert (answer.as_status, answer.uuid) == (OK, "")
    assert [r.status() for r in live] == [FINISHED] * 4
    assert [len(r.take_all()) for r in live] == [300] * 4


@case("1.4.12", *ANSWER, "StopRequestRequest.uuid")
def SyncRequest_without_a_uuid_does_not_wait_for_other_tenants(s: Server) -> None:
    other = s.needs_other_tenant()
    live = s.start(PROMPT, max_length=s.long)
    answer = s.answer("SyncRequest", pb.StopRequestRequest(), at=other)
    assert answer.as_status == OK
    assert live.status() != FINISHED
    assert live.release() == OK


@case("1.4.12", *ANSWER)
def SyncRequest_with_nothing_live_returns_at_once(s: Server) -> None:
    assert s.answer("SyncRequest", pb.StopRequestRequest()).as_status == OK
    assert s.answer("SyncRequest", pb.StopRequestRequest(model_name="conformance-nobody")).as_status == OK


@case("1.4.12", *ANSWER)
def SyncRequest_blocks_nothing_else(s: Server) -> None:
    live = s.start(PROMPT, max_length=s.long)
    with s.later("SyncRequest", pb.StopRequestRequest(uuid=live.uuid)) as waiting:
        assert len(s.generate([8, 9])) == 8
        assert not waiting.done()
        assert live.stop() == OK
        assert waiting.result().as_status == OK
    assert live.release() == OK


@case("1.4.12", *ANSWER)
def SyncRequest_may_be_given_up(s: Server) -> None:
    live = s.start(PROMPT, max_length=s.long)
    message = pb.StopRequestRequest(uuid=live.uuid)
    with pytest.raises(grpc.RpcError) as error:
        s.ask("SyncRequest", message, timeout_s=0.1)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert live.status() in (pb.Init, pb.Generating), "the request goes on"
    assert live.release() == OK


@case("1.5 #1", *ANSWER, "GeneratedElements.ids_from_generate")
def many_clients_start_read_and_release_at_once(s: Server) -> None:
    expected = {i: s.generate([5 + i], new=12) for i in range(8)}

    def client(i: int) -> list[list[int]]:
        return [s.generate([5 + i], new=12) for _ in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for i, results in zip(range(8), pool.map(client, range(8)), strict=True):
            assert results == [expected[i]] * 8


@case("1.5 #2", "GenerateRequestStatus.status", "GenerateLen.len", "GeneratedElements.empty", "UUID.uuid")
def an_unknown_uuid_is_never_a_success(s: Server) -> None:
    unknown = _unknown(s)
    assert unknown.status() == INTERRUPTED
    assert unknown.length() == 0
    assert unknown.get().empty == unknown.get_no_wait().empty == 1
    assert not unknown.get().ids_from_generate


@case("1.5 #3", *ANSWER)
def SyncRequest_of_an_unknown_uuid_waits_for_nobody(s: Server) -> None:
    live = s.start(PROMPT, max_length=s.long)
    assert _unknown(s).sync() == ILLEGAL_ID
    assert live.status() != FINISHED
    assert live.release() == OK


@case("1.5 #4", "GenerateConfig.max_length")
def max_length_below_the_prompt_harms_nobody(s: Server) -> None:
    live = s.start(PROMPT, new=200)
    assert s.refused(request(s.main, PROMPT, max_length=1)) == LIMIT
    assert len(live.take_all()) == 200


@case("1.5 #5", "GenerateConfig.eos_token_id", "GenerateConfig.early_stopping")
def a_first_token_that_ends_the_request_is_told(s: Server) -> None:
    first = s.generate(PROMPT, new=1)
    live = s.start(PROMPT, eos_token_id=first[0], early_stopping=True, max_length=0)
    assert live.drain() == first
    assert live.status() == FINISHED
    assert live.finish_reason() == "eos"
    assert live.release() == OK


@case("1.5 #6", "GeneratedElements.ids_from_generate", "GenerateRequestStatus.status")
def the_loop_of_upstreams_examples_loses_nothing(s: Server) -> None:
    """Get, then GenerateStatus, leave at a terminal status: many times, through both gateways, at once."""
    expected = s.generate(PROMPT, new=5)

    def loop(_: int) -> list[int]:
        live = s.start(PROMPT, new=5)
        tokens: list[int] = []
        while True:
            tokens += live.get().ids_from_generate
            if live.status() in (FINISHED, INTERRUPTED):
                break
        assert live.release() == OK
        return tokens

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(loop, range(240))) == [expected] * 240


@case("1.5 #7", *ANSWER)
def StopRequest_right_after_StartRequest_then_SyncRequest(s: Server) -> None:
    for _ in range(10):
        live = s.start(PROMPT, max_length=s.long)
        assert (live.stop(), live.sync(), live.status()) == (OK, OK, FINISHED)
        assert len(live.drain()) == live.length()
        assert live.release() == OK


@case("1.5 #10", "AsEngineStat.model_name")
def statistics_before_StartModel_are_zeros(s: Server) -> None:
    with s.model(start=False) as name:
        assert s.stat(name) == pb.AsEngineStat(model_name=name)


@case("1.5 #13", "GenerateConfig.do_sample", "StopWordIds.ids", "StopWordIds.Array.word")
def stop_words_hold_without_do_sample(s: Server) -> None:
    plain = s.generate(PROMPT, new=12)
    stopped = s.generate(PROMPT, new=12, do_sample=False, stop_words_ids=[[plain[4]]])
    assert stopped == plain[: plain.index(plain[4]) + 1]


@case("1.5 #14", "GenerateConfig.repetition_penalty")
def repetition_penalty_zero_is_one(s: Server) -> None:
    assert s.generate(PROMPT, repetition_penalty=0.0) == s.generate(PROMPT, repetition_penalty=1.0)


@case("1.5 #15", "ModelStructConfig.enable_prefix_cache")
def prefixes_do_not_leak_into_other_prompts(s: Server) -> None:
    prompts = [[first, *(3 + i % 90 for i in range(47)), last] for first in (5, 6) for last in (7, 8)]
    with s.model(enable_prefix_cache=True, prefix_cache_ttl=300) as name:
        for prompt in prompts * 2:
            assert s.generate(prompt, model=name) == s.generate(prompt)


@case("1.5 #19", "OpProfilingInfo.op_profiling_info")
def reading_a_profile_does_not_disturb_requests(s: Server) -> None:
    live = s.start(PROMPT, new=200)
    for _ in range(3):
        s.answer("GetOpProfilingInfo", pb.ModelName(model_name=s.main))
    assert live.take_all() == s.generate(PROMPT, new=200)
