"""Every rule of admission: one row, one status, one reason."""

import numpy as np
import pytest
from allspark_broker.admission import check_request, check_uuid, digest
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

FACTS = fleet.ModelFacts(vocab_size=100, max_length=32, max_batch=6, kv_tokens=1000, hidden_size=8)
NAN, INF = float("nan"), float("inf")


def request(ids: object = (1, 2, 3), dtype: int = pb.INT64, **config: object) -> pb.StartRequestRequest:
    r = pb.StartRequestRequest(model_name="m")
    array = np.asarray(ids, {pb.INT64: "<i8", pb.INT32: "<i4", pb.FLOAT32: "<f4"}[dtype])
    tensor = r.inputs.tensor_map["input_ids"]
    tensor.data_type, tensor.data = dtype, array.tobytes()
    tensor.shape.dims[:] = [1, array.size]
    for key, value in config.items():
        if key in ("stop_words_ids", "bad_words_ids"):
            for word in value:  # type: ignore[attr-defined]
                getattr(r.config, key).ids.add(word=word)
        elif isinstance(value, dict | list):
            getattr(r.config, key).MergeFrom(value) if isinstance(value, list) else getattr(
                r.config, key
            ).update(value)
        else:
            setattr(r.config, key, value)
    return r


def shaped(dims: list[int], size: int, dtype: int = pb.INT64) -> pb.StartRequestRequest:
    r = request()
    tensor = r.inputs.tensor_map["input_ids"]
    tensor.shape.dims[:] = dims
    tensor.data = bytes(size)
    tensor.data_type = dtype
    return r


def other_tensor(tensor: pb.Tensor) -> pb.StartRequestRequest:
    r = request()
    r.inputs.tensor_map["extra"].CopyFrom(tensor)
    return r


def guided(**config: object) -> pb.StartRequestRequest:
    return request(response_format={"type": "json_object"}, **config)


def schema(text: str) -> pb.StartRequestRequest:
    return request(response_format={"type": "json_schema", "json_schema": text})


def task(**fields: int) -> pb.StartRequestRequest:
    r = request(probe_only=bool(fields.pop("probe_only", False)))
    for key, value in fields.items():
        setattr(r, key, value)
    return r


def rich(
    ids: tuple[int, ...],
    name: str,
    dims: tuple[int, ...],
    dtype: int = pb.FLOAT32,
    value: float = 0.5,
    size: int | None = None,
) -> pb.StartRequestRequest:
    """A rich-text request with one tensor of embeddings."""
    r = request(ids)
    r.mm_type = pb.MultiMediaTypeRichText
    data = np.full(dims, value, "<f4").tobytes()
    if dtype == pb.FLOAT16:
        data = np.full(dims, value, "<f2").tobytes()
    r.inputs.tensor_map[name].CopyFrom(pb.Tensor(data=data[:size], data_type=dtype, shape=shape(*dims)))
    return r


def shape(*dims: int) -> pb.Tensor.Shape:
    return pb.Tensor.Shape(dims=dims)


LEGAL = {
    "everything at its wire zero": request(),
    "INT32 ids": request(dtype=pb.INT32),
    "one-dimensional ids": shaped([3], 24),
    "longest prompt": request([1] * 30),
    "longest max_length": request(max_length=32),
    "one new token": request(max_length=4),
    "negative eos means none": request(eos_token_id=-1),
    "largest eos": request(eos_token_id=99),
    "negative temperature means greedy": request(temperature=-1.0),
    "penalties at their limits": request(repetition_penalty=2.0, presence_penalty=-2.0, top_p=1.0),
    "top_k over the vocabulary": request(top_k=1_000_000),
    "empty stop word": request(stop_words_ids=[[]]),
    "vocab without a response format": request(vocab={"a": 1}, vocab_type=pb.VOCAB_TYPE_BPE),
    "response format that switches nothing on": request(response_format={"type": ""}),
    "response format text": request(response_format={"type": "text"}),
    "JSON": request(response_format={"type": "json_object"}),
    "JSON of a schema": request(response_format={"type": "json_object", "json_schema": '{"enum": ["ü"]}'}),
    "schema that allows anything": request(response_format={"type": "json_schema", "json_schema": "true"}),
    "regex": request(response_format={"type": "regex", "regex": "a+"}),
    "grammar": request(response_format={"type": "grammar", "grammar": 'start: "a"'}),
    "vocabulary with holes": guided(vocab={"a": 0, "b": 99}, vocab_type=pb.VOCAB_TYPE_BPE),
    "ignored by definition": request(loop_context=True, input_len=7, num_beams=1, num_return_sequences=1),
    "neither beams nor sequences": request(num_beams=0, num_return_sequences=0),
    "most beams": request(num_beams=6, num_return_sequences=6, length_penalty=-8.0),
    "length_penalty without beams": request(length_penalty=100.0),
    "settings of each sequence": request(
        num_return_sequences=2, top_k_arr=[0, 5], top_p_arr=[0.0, 1.0], seed_arr=[-1, 1]
    ),
    "settings of all sequences": request(
        num_return_sequences=5, top_k_arr=[3], top_p_arr=[0.5], seed_arr=[9]
    ),
    "one setting for one": request(top_k_arr=[3], top_p_arr=[0.5], seed_arr=[9]),
    "a probe": request(probe_only=True),
    "ModelInference": task(infer_type=pb.ModelInference),
    "rich text without embeddings": task(mm_type=pb.MultiMediaTypeRichText),
    "one run": rich((1, 9, 9, 2), "9", (2, 8)),
    "two runs": rich((9, 9, 1, 9, 9), "9", (2, 2, 8), pb.FLOAT16),
    "another tensor": other_tensor(pb.Tensor(shape=shape(2), data_type=pb.INT8, data=b"ab")),
    "a string tensor": other_tensor(pb.Tensor(shape=shape(1), data_type=pb.STRING, data="grüß".encode())),
}
setattr(LEGAL["ignored by definition"].config, "async", True)

ILLEGAL = [
    ("no inputs", pb.StartRequestRequest(model_name="m"), 2, "no tensor 'input_ids'"),
    ("empty prompt", request([]), 7, "empty"),
    ("prompt one over the limit", request([1] * 31), 7, "limit is 30"),
    ("max_length over the limit", request(max_length=33), 7, "over engine_max_length 32"),
    ("max_length equal to the prompt", request(max_length=3), 7, "must exceed its 3 tokens"),
    ("max_length below the prompt", request(max_length=1), 7, "must exceed"),
    ("negative max_length", request(max_length=-1), 2, "must not be negative"),
    ("negative id", request([1, -1]), 2, "token id -1 at 1"),
    ("id over the vocabulary", request([1, 100]), 2, "token id 100 at 1"),
    ("huge id", request([2**62]), 2, "outside the vocabulary"),
    ("stop word id over the vocabulary", request(stop_words_ids=[[1], [100]]), 2, "stop_words_ids"),
    ("negative stop word id", request(stop_words_ids=[[-5]]), 2, "stop_words_ids"),
    ("bad word id over the vocabulary", request(bad_words_ids=[[100]]), 2, "bad_words_ids"),
    ("negative bad word id", request(bad_words_ids=[[-1]]), 2, "bad_words_ids"),
    ("eos over the vocabulary", request(eos_token_id=100), 2, "eos_token_id 100"),
    ("too many stop words", request(stop_words_ids=[[1]] * 1025), 7, "1025 words"),
    ("too long a bad word", request(bad_words_ids=[[1] * 1025]), 7, "1025 tokens"),
    ("fewer bytes than the shape", shaped([1, 3], 16), 2, "needs 24 bytes, data has 16"),
    ("more bytes than the shape", shaped([1, 3], 32), 2, "needs 24 bytes"),
    ("negative dimension", shaped([1, -3], 24), 2, "negative dimension"),
    ("huge dimensions", shaped([2**31 - 1, 2**31 - 1], 24), 2, "needs"),
    ("two prompts", shaped([2, 3], 48), 7, "2 rows"),
    ("three dimensions", shaped([1, 1, 3], 24), 2, "shape"),
    ("float ids", request(dtype=pb.FLOAT32), 2, "must be INT64 or INT32, not FLOAT32"),
    ("unknown dtype", shaped([1, 3], 24, 77), 2, "must be INT64 or INT32, not unknown (77)"),
    ("string ids", shaped([1], 3, pb.STRING), 2, "INT64 or INT32"),
    (
        "another tensor with wrong bytes",
        other_tensor(pb.Tensor(shape=shape(2), data_type=pb.INT16, data=b"a")),
        2,
        "extra",
    ),
    (
        "a string that is not UTF-8",
        other_tensor(pb.Tensor(shape=shape(1), data_type=pb.STRING, data=b"\xff")),
        2,
        "not UTF-8",
    ),
    ("top_p below 0", request(top_p=-0.1), 2, "top_p"),
    ("top_p over 1", request(top_p=1.1), 2, "top_p"),
    ("top_p not a number", request(top_p=NAN), 2, "top_p"),
    ("top_k negative", request(top_k=-1), 2, "top_k"),
    ("repetition_penalty over 2", request(repetition_penalty=2.1), 2, "repetition_penalty"),
    ("repetition_penalty negative", request(repetition_penalty=-0.1), 2, "repetition_penalty"),
    ("presence_penalty over 2", request(presence_penalty=2.5), 2, "presence_penalty"),
    ("temperature not a number", request(temperature=NAN), 2, "temperature"),
    ("temperature infinite", request(temperature=INF), 2, "temperature"),
    ("no_repeat_ngram_size negative", request(no_repeat_ngram_size=-1), 2, "no_repeat_ngram_size"),
    ("async_token_num negative", request(async_token_num=-1), 2, "async_token_num"),
    ("unknown response format", request(response_format={"type": "yaml"}), 2, "unknown type 'yaml'"),
    ("schema without a type", request(response_format={"json_schema": "{}"}), 2, "uses none of them"),
    ("schema is missing", request(response_format={"type": "json_schema"}), 2, "needs the key 'json_schema'"),
    ("regex is missing", request(response_format={"type": "regex"}), 2, "needs the key 'regex'"),
    ("regex is empty", request(response_format={"type": "regex", "regex": ""}), 2, "is empty"),
    ("unknown key", request(response_format={"type": "json_object", "strict": "1"}), 2, "strict"),
    (
        "key of another type",
        request(response_format={"type": "regex", "regex": "a", "grammar": ""}),
        2,
        "not use",
    ),
    ("schema that is no JSON", schema("{"), 2, "not JSON"),
    ("schema with a constant that is no JSON", schema('{"maximum": NaN}'), 2, "NaN"),
    ("schema that is a number", schema("5"), 2, "an object, true or false"),
    ("schema nested for ever", schema("[" * 100_000), 2, "nested too deeply"),
    ("schema of over a MiB", schema(" " * (1 << 20) + "{}"), 7, "the limit is 1048576"),
    ("guided beams", guided(num_beams=2), 2, "num_beams"),
    ("vocab over the vocabulary", guided(vocab={"a": 100}), 2, "id 100 is outside"),
    ("negative id in vocab", guided(vocab={"a": -1}), 2, "id -1 is outside"),
    ("id twice in vocab", guided(vocab={"a": 1, "b": 1}), 2, "same id"),
    ("long entry in vocab", guided(vocab={"a" * 257: 1}), 7, "256 characters"),
    ("unknown vocab_type", guided(vocab={"a": 1}, vocab_type=9), 2, "vocab_type 9"),
    ("huge vocab", guided(vocab={"a" * (17 << 20): 1}), 7, "the limit is 16777216"),
    ("huge vocab that nothing uses", request(vocab={"a" * (17 << 20): 1}), 7, "the limit is 16777216"),
    ("nine beams", request(num_beams=9), 2, "up to 8"),
    ("more beams than places", request(num_beams=7), 7, "engine_max_batch is 6"),
    ("more results than beams", request(num_beams=2, num_return_sequences=3), 2, "no more than 2 results"),
    ("too many sequences", request(num_return_sequences=129), 7, "the limit is 128"),
    ("negative num_beams", request(num_beams=-1), 2, "num_beams"),
    ("negative num_return_sequences", request(num_return_sequences=-1), 2, "num_return_sequences"),
    ("length_penalty not a number", request(num_beams=2, length_penalty=NAN), 2, "length_penalty"),
    ("length_penalty too large", request(num_beams=2, length_penalty=8.5), 2, "[-8, 8]"),
    ("two top_k_arr for one sequence", request(top_k_arr=[1, 2]), 2, "top_k_arr has 2 elements"),
    ("two top_p_arr for three", request(top_p_arr=[0.1, 0.2], num_return_sequences=3), 2, "top_p_arr has 2"),
    ("four seeds for three", request(seed_arr=[1, 2, 3, 4], num_return_sequences=3), 2, "seed_arr has 4"),
    ("negative top_k_arr", request(top_k_arr=[-1]), 2, "top_k_arr has -1"),
    ("top_p_arr over 1", request(top_p_arr=[1.5]), 2, "top_p_arr has 1.5"),
    ("top_p_arr not a number", request(top_p_arr=[NAN]), 2, "top_p_arr has nan"),
    ("unknown infer_type", task(infer_type=7), 2, "infer_type 7"),
    ("unknown mm_type", task(mm_type=7), 2, "mm_type 7"),
    ("a probe that infers", task(infer_type=1, probe_only=True), 2, "use one of them"),
    ("embeddings for a token that is not there", rich((1, 2), "9", (1, 8)), 2, "the prompt has 0"),
    ("embeddings for one of two runs", rich((9, 9, 1, 9, 9), "9", (2, 8)), 2, "for 1 runs"),
    ("embeddings for too many runs", rich((9, 9, 1), "9", (2, 2, 8)), 2, "for 2 runs"),
    ("embeddings of a run of other length", rich((9, 9, 1, 9), "9", (2, 2, 8)), 2, "the one at 3"),
    ("adjacent runs are one", rich((9, 9, 9, 9), "9", (2, 2, 8)), 2, "for 2 runs"),
    ("embeddings of another width", rich((9, 9, 1), "9", (2, 7)), 2, "the model's have 8"),
    ("embeddings with one dimension", rich((9,), "9", (8,)), 2, "[rows, hidden]"),
    ("embeddings that are integers", rich((9,), "9", (1, 8), pb.INT32), 2, "FLOAT32, FLOAT16 or BFLOAT16"),
    ("embeddings that are not numbers", rich((9,), "9", (1, 8), value=NAN), 2, "finite"),
    ("embeddings that are too short", rich((9,), "9", (1, 8), size=31), 2, "data has 31"),
]


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str) -> None:
    check_request(LEGAL[name], FACTS)


@pytest.mark.parametrize(("name", "bad", "status", "reason"), ILLEGAL, ids=[row[0] for row in ILLEGAL])
def test_illegal(name: str, bad: pb.StartRequestRequest, status: int, reason: str) -> None:
    with pytest.raises(FleetError) as e:
        check_request(bad, FACTS)
    assert e.value.status == status
    assert reason in e.value.reason


def test_a_prompt_that_can_never_fit_the_kv_memory_is_rejected_at_once() -> None:
    facts = fleet.ModelFacts(vocab_size=100, max_length=4096, kv_tokens=64)
    check_request(request([1] * 63), facts)
    with pytest.raises(FleetError) as e:
        check_request(request([1] * 64), facts)
    assert e.value.status == pb.ALLSPARK_CACHE_MEMORY_OUT


@pytest.mark.parametrize("uuid", ["", "x" * 257, "ü" * 129, "x" * (1 << 20)])
def test_uuid_that_is_empty_or_too_long(uuid: str) -> None:
    with pytest.raises(FleetError) as e:
        check_uuid(uuid, 256)
    assert e.value.status == pb.ALLSPARK_PARAM_ERROR


def test_equal_bodies_have_equal_digests_whatever_the_order_of_their_maps() -> None:
    a, b = request(), request()
    for i in range(50):
        a.config.vocab[f"t{i}"] = i
        b.config.vocab[f"t{49 - i}"] = 49 - i
    assert digest(a) == digest(b)
    b.config.seed = 1
    assert digest(a) != digest(b)


def test_hidden_states_that_no_message_holds_are_rejected() -> None:
    facts = fleet.ModelFacts(vocab_size=100, max_length=32768, hidden_size=4096)
    check_request(task(infer_type=pb.ModelInference), facts)
    big = request([1] * 3100)
    check_request(big, facts)
    big.infer_type = pb.ModelInference
    with pytest.raises(FleetError) as e:
        check_request(big, facts)
    assert e.value.status == pb.ALLSPARK_EXCEED_LIMIT_ERROR


@pytest.mark.parametrize(("name", "fits", "limit"), [("input_ids", 4, 32), ("extra", 256, 256)])
def test_a_sparse_tensor_stands_for_no_more_than_the_model_reads(name: str, fits: int, limit: int) -> None:
    """An empty ELL matrix of any shape takes no bytes on the wire."""
    r = request()
    r.inputs.tensor_map[name].CopyFrom(pb.Tensor(data_type=pb.INT64, data_mode=pb.ELL))
    r.inputs.tensor_map[name].shape.dims[:] = [1, limit + 1]
    with pytest.raises(FleetError, match=f"too large to expand, the limit is {limit} values") as caught:
        check_request(r, FACTS)
    assert caught.value.status == pb.ALLSPARK_EXCEED_LIMIT_ERROR
    r.inputs.tensor_map[name].shape.dims[:] = [1, fits]
    check_request(r, FACTS)
