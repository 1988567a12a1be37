"""Sections 3.3 to 3.7: the result queue."""

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conformance.server import DENIED, FINISHED, INTERRUPTED, OK, Request, Server, request
from tests.conformance.suite import case

PROMPT = [5, 6, 7]
IDS = "GeneratedElements.ids_from_generate"
EMPTY = "GeneratedElements.empty"
LEN = "GenerateLen.len"
STATUS = "GenerateRequestStatus.status"


@case("3.3, 9 #8", LEN)
def GeneratedLength_is_cumulative_and_reading_does_not_reduce_it(s: Server) -> None:
    live = s.start(PROMPT, new=20)
    assert live.sync() == OK
    assert live.length() == 20
    assert len(live.drain()) == 20
    assert live.length() == 20
    assert live.release() == OK
    assert live.length() == 0


@case("3.3", LEN, "GenerateConfig.stop_words_ids")
def GeneratedLength_counts_eos_and_stop_words(s: Server) -> None:
    plain = s.generate(PROMPT, new=12)
    live = s.start(PROMPT, new=12, stop_words_ids=[plain[4:6]])
    assert live.sync() == OK
    assert live.length() == len(live.drain()) >= 2
    assert live.release() == OK


@case("3.4", IDS, EMPTY)
def Get_returns_all_unread_tokens(s: Server) -> None:
    live = s.start(PROMPT, new=20)
    assert live.sync() == OK
    element = live.get()
    assert (len(element.ids_from_generate), element.empty) == (20, 0)
    assert live.release() == OK


@case("3.4", IDS, EMPTY)
def Get_blocks_until_there_is_something(s: Server) -> None:
    with s.model(engine_max_batch=1, engine_max_length=s.long) as name:
        ahead = [s.start(PROMPT, model=name, max_length=s.long) for _ in range(12)]
        last = s.start(PROMPT, model=name)
        with s.later("Get", last.key) as waiting:
            assert last.status() == pb.Init
            assert not waiting.done()
            assert [r.release() for r in ahead] == [OK] * 12
            assert waiting.result().ids_from_generate
        assert last.release() == OK


@case("3.4", IDS, EMPTY)
def Get_of_what_is_finished_and_drained_has_no_ids_and_empty_0(s: Server) -> None:
    live = s.start(PROMPT)
    assert len(live.drain()) == 8
    for _ in range(2):
        element = live.get()
        assert (list(element.ids_from_generate), element.empty) == ([], 0)
    assert live.release() == OK


@case("3.4, 9 #5", IDS, EMPTY)
def Get_never_has_no_ids_before_the_end(s: Server) -> None:
    live = s.start(PROMPT, new=300)
    while live.get().ids_from_generate:
        pass
    assert live.status() == FINISHED
    assert live.release() == OK


@case("3.4", EMPTY, "UUID.uuid")
def Get_of_an_unknown_or_released_uuid_is_empty(s: Server) -> None:
    live = s.start(PROMPT)
    live.take_all()
    for gone in (live, Request(s, s.main, "conformance-never-seen"), Request(s, s.main, "")):
        for element in (gone.get(), gone.get_no_wait()):
            assert (list(element.ids_from_generate), element.empty) == ([], 1)
            assert element.HasField("tensors_from_model_inference")


@case("D", IDS, EMPTY, LEN, STATUS, "UUID.uuid")
def another_tenants_uuid_is_an_unknown_one(s: Server) -> None:
    other = s.needs_other_tenant()
    live = s.start(PROMPT, new=200)
    stranger = Request(s, s.main, live.uuid, other)
    assert (stranger.status(), stranger.length()) == (INTERRUPTED, 0)
    for element in (stranger.get(), stranger.get_no_wait()):
        assert (list(element.ids_from_generate), element.empty) == ([], 1)
    assert len(live.take_all()) == 200, "nothing of it was taken"


@case("3.4", IDS, STATUS)
def Get_delivers_the_tokens_of_an_interrupted_request_first(s: Server) -> None:
    """Interrupted by a deadline, which a client may set in the metadata of StartRequest."""
    for deadline_ms in ("500", "2000", "8000"):  # in which a busy server, too, comes to a token
        message = request(s.main, PROMPT, max_length=s.long)
        limit_s = time.monotonic() + 60
        while True:  # it cannot keep its deadline, which is taken only where it runs alone
            answer, _ = s.ask("StartRequest", message, metadata=[("allspark-deadline-ms", deadline_ms)])
            if answer.as_status != DENIED or time.monotonic() > limit_s:
                break
            time.sleep(0.05)
        assert answer.as_status == OK
        live = Request(s, s.main, answer.uuid)
        assert (live.sync(), live.status()) == (OK, INTERRUPTED)
        assert live.finish_reason() == "deadline"
        tokens = live.drain()
        assert len(tokens) == live.length()
        assert (live.status(), live.get().empty) == (INTERRUPTED, 0)
        assert (live.stop(), live.status()) == (OK, INTERRUPTED), "it ended before"
        assert live.release() == OK
        if tokens:
            break
    assert tokens and tokens == s.generate(PROMPT, new=len(tokens))


@case("3.4", IDS)
def two_Gets_at_once_share_the_tokens(s: Server) -> None:
    live = s.start(PROMPT, new=200)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(live.drain)
        ours, theirs = live.drain(), other.result()
    assert len(ours) + len(theirs) == 200
    assert sorted(ours + theirs) == sorted(s.generate(PROMPT, new=200))
    assert live.release() == OK


@case("3.4", IDS)
def a_Get_that_is_given_up_loses_nothing(s: Server) -> None:
    with s.model(engine_max_batch=1, engine_max_length=s.long) as name:
        ahead = [s.start(PROMPT, model=name, max_length=s.long) for _ in range(12)]
        last = s.start(PROMPT, model=name)
        with pytest.raises(grpc.RpcError) as error:
            s.ask("Get", last.key, timeout_s=0.05)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert [r.release() for r in ahead] == [OK] * 12
        assert last.take_all() == s.generate(PROMPT)


@case("3.5, 9 #6", IDS, EMPTY)
def GetNoWait_never_waits(s: Server) -> None:
    with s.model(engine_max_batch=1, engine_max_length=s.long) as name:
        ahead = [s.start(PROMPT, model=name, max_length=s.long) for _ in range(12)]
        last = s.start(PROMPT, model=name)
        began = time.monotonic()
        element = last.get_no_wait()
        assert time.monotonic() - began < 30, "what it would wait for takes longer"
        assert (list(element.ids_from_generate), element.empty) == ([], 0)
        assert [r.release() for r in ahead] == [OK] * 12
        assert last.sync() == OK
        assert len(last.get_no_wait().ids_from_generate) == 8
        assert (list(last.get_no_wait().ids_from_generate), last.get_no_wait().empty) == ([], 0)
        assert last.release() == OK


@case("3.6 #1, 9 #7", STATUS, IDS)
def all_tokens_are_readable_when_the_end_is_visible(s: Server) -> None:
    for _ in range(20):
        live = s.start(PROMPT, new=5)
        while live.status() != FINISHED:
            pass
        assert len(live.get_no_wait().ids_from_generate) == 5
        assert live.release() == OK


@case("3.6 #2", STATUS)
def who_polls_the_status_without_reading_sees_the_end(s: Server) -> None:
    live = s.start(PROMPT, new=30)
    while (status := live.status()) in (pb.Init, pb.Generating):
        pass
    assert status == FINISHED
    assert len(live.take_all()) == 30
    other = s.start(PROMPT, new=30)
    assert (other.sync(), other.status()) == (OK, FINISHED), "at once: nobody has read it"
    assert len(other.take_all()) == 30


@case("3.6 #2", STATUS)
def a_reader_with_unread_tokens_is_not_told_the_end_at_once_but_soon(s: Server) -> None:
    for _ in range(20):  # until the question comes in time, before the wait for the reader is over
        live = s.start(PROMPT, new=600)
        assert live.get().ids_from_generate
        assert live.sync() == OK, "which sees the true status"
        is_held_back = live.status() == pb.Generating
        began = time.monotonic()
        while live.status() == pb.Generating:
            assert time.monotonic() - began < 30
        assert live.status() == FINISHED
        assert live.release() == OK
        if is_held_back:
            return
    pytest.fail("the end was told at once, every time")


@case("3.6 #2", STATUS)
def a_reader_who_has_everything_is_told_the_end_at_once(s: Server) -> None:
    for _ in range(20):  # until the gateway knows in time that its last answer arrived
        live = s.start(PROMPT, new=30, at=s.addresses[0])
        delivered = 0
        while delivered < 30:
            delivered += len(live.get().ids_from_generate)
        assert live.sync() == OK
        status = live.status()
        assert live.release() == OK
        if status == FINISHED:
            return
    pytest.fail("the end was held back, every time")


@case("3.6 #3", LEN, IDS)
def GeneratedLength_is_never_less_than_what_was_delivered(s: Server) -> None:
    live = s.start(PROMPT, new=300)
    delivered = 0
    while ids := live.get().ids_from_generate:
        delivered += len(ids)
        assert live.length() >= delivered
    assert live.length() == delivered == 300
    assert live.release() == OK


@case("3.6 #4", STATUS)
def the_status_never_goes_back(s: Server) -> None:
    live = s.start(PROMPT, new=300)
    order = [pb.Init, pb.ContextFinished, pb.Generating, FINISHED]
    seen = [live.status()]
    while seen[-1] != FINISHED:
        live.get_no_wait()
        seen.append(live.status())
    assert [order.index(status) for status in seen] == sorted(order.index(status) for status in seen)
    assert [live.status() for _ in range(3)] == [FINISHED] * 3
    assert live.release() == OK


@case("3.7", IDS, "GenerateConfig.early_stopping")
def without_early_stopping_eos_is_an_ordinary_token(s: Server) -> None:
    plain = s.generate(PROMPT, new=12)
    assert s.generate(PROMPT, new=12, eos_token_id=plain[3], early_stopping=False) == plain


@case("3.7", IDS, STATUS)
def what_was_queued_before_a_stop_stays_readable(s: Server) -> None:
    live = s.start(PROMPT, max_length=s.long)
    while live.length() < 10:
        pass
    assert live.stop() == OK
    length = live.length()
    assert length >= 10
    assert len(live.drain()) == length
    assert live.length() == length, "nothing more is appended"
    assert live.release() == OK
