"""Section 1.4.9: StartRequest, its order of checks and the identity of requests."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conformance import oracle
from tests.conformance.server import (
    CACHE_OUT,
    DENIED,
    FINISHED,
    INVALID,
    LIMIT,
    MAX_LENGTH,
    OK,
    PARAM,
    Request,
    Server,
    array_of,
    request,
    tensor,
)
from tests.conformance.suite import add, case

PROMPT = [5, 6, 7]
LIMITS = MAX_LENGTH  # engine_max_length of the model that these cases use
CONFIG = "GenerateConfig."
MESSAGE = "StartRequestRequest."
ROWS: tuple[tuple[str, str, int, list[int], dict[str, Any]], ...] = (
    ("#4", "max_length over engine_max_length", LIMIT, PROMPT, {"max_length": LIMITS + 1}),
    ("#4", "max_length at engine_max_length", OK, PROMPT, {"max_length": LIMITS}),
    ("#5", "prompt one over its limit", LIMIT, [5] * (LIMITS - 1), {"max_length": 0}),
    ("#5", "prompt at its limit", OK, [5] * (LIMITS - 2), {"max_length": 0}),
    ("#6", "empty prompt", LIMIT, [], {"max_length": 8}),
    ("#8", "top_k below zero", PARAM, PROMPT, {"top_k": -1}),
    ("#9", "top_p below zero", PARAM, PROMPT, {"top_p": -0.1}),
    ("#9", "top_p over one", PARAM, PROMPT, {"top_p": 1.1}),
    ("#9", "top_p not a number", PARAM, PROMPT, {"top_p": float("nan")}),
    ("#10", "temperature zero", OK, PROMPT, {"temperature": 0.0}),
    ("#10", "temperature below zero", OK, PROMPT, {"temperature": -1.0}),
    ("#10", "temperature not a number", PARAM, PROMPT, {"temperature": float("nan")}),
    ("#11", "top_p one", OK, PROMPT, {"top_p": 1.0}),
    ("#14", "repetition_penalty below zero", PARAM, PROMPT, {"repetition_penalty": -0.5}),
    ("#14", "repetition_penalty over two", PARAM, PROMPT, {"repetition_penalty": 2.5}),
    ("#14", "repetition_penalty two", OK, PROMPT, {"repetition_penalty": 2.0}),
    ("#15", "presence_penalty below its range", PARAM, PROMPT, {"presence_penalty": -2.5}),
    ("#15", "presence_penalty over its range", PARAM, PROMPT, {"presence_penalty": 2.5}),
    ("#15", "presence_penalty at its ends", OK, PROMPT, {"presence_penalty": -2.0}),
    ("#17", "lora_name that is not there", PARAM, PROMPT, {"lora_name": "conformance-no-such-adapter"}),
    ("late", "max_length below the prompt", LIMIT, PROMPT, {"max_length": 2}),
    ("late", "max_length equal to the prompt", LIMIT, PROMPT, {"max_length": 3}),
    ("late", "max_length one over the prompt", OK, PROMPT, {"max_length": 4}),
    ("late", "max_length zero", OK, PROMPT, {"max_length": 0}),
    ("late", "max_length below zero", PARAM, PROMPT, {"max_length": -1}),
    ("2.5", "no_repeat_ngram_size below zero", PARAM, PROMPT, {"no_repeat_ngram_size": -1}),
    ("2.5", "num_beams below zero", PARAM, PROMPT, {"num_beams": -1}),
    ("D", "num_beams over eight", PARAM, PROMPT, {"num_beams": 9}),
    ("2.5", "num_return_sequences below zero", PARAM, PROMPT, {"num_return_sequences": -1}),
    ("D", "more sequences than beams", PARAM, PROMPT, {"num_beams": 2, "num_return_sequences": 3}),
    ("D", "top_k_arr of a wrong length", PARAM, PROMPT, {"num_return_sequences": 3, "top_k_arr": [1, 1]}),
    ("D", "top_p_arr of a wrong length", PARAM, PROMPT, {"num_return_sequences": 3, "top_p_arr": [0.5] * 4}),
    ("D", "seed_arr of a wrong length", PARAM, PROMPT, {"num_return_sequences": 3, "seed_arr": [1, 2]}),
    ("D", "top_k_arr below zero", PARAM, PROMPT, {"top_k_arr": [-1]}),
    ("D", "top_p_arr outside its range", PARAM, PROMPT, {"top_p_arr": [1.5]}),
    ("2.5", "async_token_num below zero", PARAM, PROMPT, {"async_token_num": -1}),
    ("2.5", "first_token_num below zero", PARAM, PROMPT, {"first_token_num": -1}),
    ("2.5", "eos_token_id outside the vocabulary", PARAM, PROMPT, {"eos_token_id": 1 << 30}),
    ("2.5", "stop word outside the vocabulary", PARAM, PROMPT, {"stop_words_ids": [[1 << 30]]}),
    ("2.5", "stop word below zero", PARAM, PROMPT, {"stop_words_ids": [[-1]]}),
    ("2.5", "bad word outside the vocabulary", PARAM, PROMPT, {"bad_words_ids": [[1 << 30]]}),
    ("2.5", "bad word below zero", PARAM, PROMPT, {"bad_words_ids": [[-1]]}),
    ("2.5.7", "json_schema that is no JSON", PARAM, PROMPT,
     {"response_format": {"type": "json_object", "json_schema": "{"}}),
    ("2.5.7", "response_format of an unknown type", PARAM, PROMPT, {"response_format": {"type": "yaml"}}),
    ("2.5.7", "json_schema without a type", PARAM, PROMPT, {"response_format": {"json_schema": "{}"}}),
    ("2.2", "unknown infer_type", PARAM, PROMPT, {"infer_type": 7}),
    ("2.2", "unknown mm_type", PARAM, PROMPT, {"mm_type": 7}),
)  # fmt: skip


def _row(status: int, prompt: list[int], config: dict[str, Any]) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        with s.short_model() as name:
            assert s.refused(request(name, prompt, **config)) == status

    return run


def _fields(config: dict[str, Any]) -> tuple[str, ...]:
    names = [(MESSAGE if f in ("infer_type", "mm_type") else CONFIG) + f for f in config]
    for name, nested in (("stop_words_ids", "StopWordIds"), ("bad_words_ids", "BadWordIds")):
        if name in config:
            names += [f"{nested}.ids", f"{nested}.Array.word"]
    return (*names, "StartRequestResponse.as_status", "StartRequestResponse.uuid")


for _number, _name, _status, _prompt, _config in ROWS:
    _spec = _number if _number[0] in "2D" else f"1.4.9 {_number}"
    add(_spec, f"{_name} {_status}", _fields(_config), _row(_status, _prompt, _config))


@case("1.4.9 #1", MESSAGE + "model_name", "StartRequestResponse.as_status")
def a_model_that_was_never_built_2(s: Server) -> None:
    assert s.refused(request("conformance-nobody", PROMPT)) == PARAM
    assert s.refused(request("", PROMPT)) == PARAM


@case("1.4.9 #7", MESSAGE + "inputs", "TensorMap.tensor_map")
def input_ids_missing_2(s: Server) -> None:
    message = request(s.main, PROMPT)
    message.ClearField("inputs")
    assert s.refused(message) == PARAM
    message.inputs.tensor_map["attention_mask"].CopyFrom(tensor([[1, 1, 1]]))
    assert s.refused(message) == PARAM


@case("1.4.9 #12", MESSAGE + "inputs", "Tensor.Shape.dims")
def a_batch_of_two_prompts_7(s: Server) -> None:
    message = request(s.main, PROMPT)
    message.inputs.tensor_map["input_ids"].CopyFrom(tensor([[5, 6], [7, 8]]))
    assert s.refused(message) == LIMIT


@case("1.4.9 #18", MESSAGE + "model_name")
def a_model_that_is_not_started_8(s: Server) -> None:
    with s.model(start=False) as name:
        assert s.refused(request(name, PROMPT)) == INVALID


@case("1.4.9", MESSAGE + "config")
def without_a_config_all_wire_zeros(s: Server) -> None:
    """Greedy from the first token on, up to the length limit of the model; a uuid is made up."""
    with s.model(engine_max_length=64) as name:
        message = request(name, PROMPT)
        message.ClearField("config")
        live = s.submit(message)
        assert live.uuid
        oracle.check_greedy(s.reference_path, PROMPT, live.take_all())


@case("1.4.9 late", CONFIG + "max_length", "GenerateLen.len")
def max_length_one_over_the_prompt_gives_one_token(s: Server) -> None:
    live = s.start(PROMPT, max_length=len(PROMPT) + 1)
    assert len(live.take_all()) == 1


@case("1.4.9 late", CONFIG + "max_length")
def max_length_zero_goes_up_to_the_models_limit(s: Server) -> None:
    with s.model(engine_max_length=40) as name:
        assert len(s.generate(PROMPT, model=name, max_length=0)) == 37


@case("1.4.9 late", "StartRequestResponse.as_status", "AsEngineStat.free_token")
def a_prompt_that_no_pool_can_hold_11(s: Server) -> None:
    own = oracle.reference(s.reference_path).config.max_position_embeddings
    status = s.refused(request(s.main, [5] * (own - 2), max_length=0))
    if status == OK:
        pytest.skip("the target's KV memory holds the longest prompt of this model")
    assert status == CACHE_OUT
    assert len(s.generate(PROMPT)) == 8, "and it blocks nobody"


@case("1.4.9 late", CONFIG + "early_stopping", CONFIG + "eos_token_id", "GenerateRequestStatus.status")
def a_request_that_ends_on_its_first_token_finishes(s: Server) -> None:
    first = s.generate(PROMPT, new=1)
    live = s.start(PROMPT, eos_token_id=first[0], early_stopping=True)
    assert live.sync() == OK
    assert live.take_all() == first


@case("1.4.9 identity", CONFIG + "uuid", "StartRequestResponse.uuid")
def an_empty_uuid_is_made_up(s: Server) -> None:
    first, second = s.start(PROMPT, uuid=""), s.start(PROMPT, uuid="")
    assert first.uuid and second.uuid and first.uuid != second.uuid
    assert first.take_all() == second.take_all()


@case("1.4.9 identity, 9 #3", CONFIG + "uuid", "StartRequestResponse.uuid", "StartRequestResponse.as_status")
def the_same_uuid_again_is_a_retry_or_a_conflict(s: Server) -> None:
    message = request(s.main, PROMPT)
    live = s.submit(message)
    assert live.uuid == message.config.uuid
    assert s.submit(message).uuid == live.uuid, "a byte-identical re-send runs once"
    other = request(s.main, [8, 9], uuid=live.uuid)
    assert s.answer("StartRequest", other).as_status == PARAM
    assert live.take_all() == s.generate(PROMPT)


@case("1.4.9 identity", CONFIG + "uuid")
def a_released_uuid_may_be_used_again(s: Server) -> None:
    first = s.start(PROMPT)
    first.take_all()
    message, began = request(s.main, [8, 9], uuid=first.uuid), time.monotonic()
    while (answer := s.ask("StartRequest", message))[0].as_status == DENIED:
        # A server that stood still for a moment cannot tell this call from a copy that lay in its sockets.
        assert time.monotonic() - began < 60
        time.sleep(int(answer[1]["allspark-retry-after-ms"]) / 1000)
    again = Request(s, s.main, answer[0].uuid)
    assert (int(answer[0].as_status), again.uuid) == (OK, first.uuid)
    assert again.take_all() == s.generate([8, 9])


@case("1.4.9 identity", CONFIG + "uuid", "UUID.uuid")
def tenants_with_the_same_uuid_do_not_see_each_other(s: Server) -> None:
    other = s.needs_other_tenant()
    uuid = "00000000000000000000000000000000"
    ours = s.start(PROMPT, uuid=uuid)
    theirs = s.start([8, 9], uuid=uuid, at=other)
    assert theirs.take_all() == s.generate([8, 9])
    assert ours.take_all() == s.generate(PROMPT)


@case("1.4.9 identity", CONFIG + "uuid", "StopRequestRequest.uuid", "UUID.uuid")
def any_text_is_a_uuid(s: Server) -> None:
    for uuid in ("*", "a b/c{d}", "\u00e4\u4e2d\n", "0" * 200):
        live = s.start(PROMPT, uuid=uuid)
        assert live.uuid == uuid
        assert len(live.take_all()) == 8


@case("D", MESSAGE + "infer_type", "GeneratedElements.tensors_from_model_inference", "Tensor.data",
      "Tensor.data_type", "Tensor.Shape.dims")  # fmt: skip
def ModelInference_answers_one_forward_pass(s: Server) -> None:
    live = s.start(PROMPT, infer_type=pb.ModelInference)
    element = live.elements()
    tensors = element.tensors_from_model_inference.tensor_map
    expected = oracle.logits(s.reference_path, PROMPT)
    hidden = oracle.reference(s.reference_path).config.hidden_size
    assert list(element.ids_from_generate) == []
    assert array_of(tensors["last_hidden_state"]).shape == (1, len(PROMPT), hidden)
    assert array_of(tensors["logits"]) == pytest.approx(expected[-1:], abs=2e-3)
    assert {t.data_type for t in tensors.values()} == {pb.FLOAT32}
    assert live.status() == FINISHED
    assert live.release() == OK


@case("D", MESSAGE + "mm_type", "TensorMap.tensor_map")
def rich_text_replaces_the_embeddings_of_placeholders(s: Server) -> None:
    embeddings = oracle.reference(s.reference_path).get_input_embeddings().weight.detach().numpy()
    prompt, placeholder = [5, 6, 7, 8, 9], 50
    rows = tensor(embeddings[[6, 7]], pb.FLOAT32)
    hidden = [5, placeholder, placeholder, 8, 9]
    rich = {"mm_type": pb.MultiMediaTypeRichText, "tensors": {str(placeholder): rows}}
    assert s.generate(hidden, new=16, **rich) == s.generate(prompt, new=16)
    mismatch = dict(rich, tensors={str(placeholder): tensor(embeddings[[6]], pb.FLOAT32)})
    assert s.refused(request(s.main, hidden, **mismatch)) == PARAM


@case("D", MESSAGE + "mm_type", "TensorMap.tensor_map", "Tensor.data_type")
def embeddings_of_several_runs(s: Server) -> None:
    embeddings = oracle.reference(s.reference_path).get_input_embeddings().weight.detach().numpy()
    placeholder, rows = 50, embeddings[[[6, 7], [9, 6]]]
    hidden = [5, placeholder, placeholder, 8, placeholder, placeholder]

    def generate(values: Any, data_type: int) -> list[int]:
        rich = {str(placeholder): tensor(values, data_type)}
        return s.generate(hidden, new=16, mm_type=pb.MultiMediaTypeRichText, tensors=rich)

    assert generate(rows, pb.FLOAT32) == s.generate([5, 6, 7, 8, 9, 6], new=16)
    half = rows.astype("<f2")
    assert generate(half, pb.FLOAT16) == generate(half.astype("<f4"), pb.FLOAT32)
    for wrong in (rows[:1], rows[:, :1], rows[..., :-1], rows.astype("<i8")):
        kind = pb.INT64 if wrong.dtype == "<i8" else pb.FLOAT32
        rich = {str(placeholder): tensor(wrong, kind)}
        message = request(s.main, hidden, mm_type=pb.MultiMediaTypeRichText, tensors=rich)
        assert s.refused(message) == PARAM


@case("D, 1.5 #15", MESSAGE + "mm_type", "ModelStructConfig.enable_prefix_cache")
def a_cached_prefix_is_not_that_of_other_embeddings(s: Server) -> None:
    embeddings = oracle.reference(s.reference_path).get_input_embeddings().weight.detach().numpy()
    placeholder, count = 50, 40
    hidden = [5, *[placeholder] * count, 8]
    with s.model(enable_prefix_cache=True, prefix_cache_ttl=300) as name:
        for first in (20, 60, 20):
            ids = [first + i % 30 for i in range(count)]
            rich = {str(placeholder): tensor(embeddings[ids], pb.FLOAT32)}
            for _ in range(4):  # each worker has seen the others before
                found = s.generate(hidden, model=name, mm_type=pb.MultiMediaTypeRichText, tensors=rich)
                assert found == s.generate([5, *ids, 8])
            assert s.generate(hidden, model=name) == s.generate(hidden), "and none at all"


@case("1.4.9", "AsEngineStat.free_span", "AsEngineStat.used_span")
def spans_of_a_request_that_is_stopped_come_back(s: Server) -> None:
    with s.model(engine_max_length=s.long) as name:
        before = s.stat(name)
        live = s.start(PROMPT, model=name, max_length=s.long)
        live.get()
        assert live.stop() == OK
        while s.stat(name).running_request:
            pass
        after = s.stat(name)
        assert (after.free_span, after.used_span) == (before.free_span, before.used_span)
        assert live.release() == OK
