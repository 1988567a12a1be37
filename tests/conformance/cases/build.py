"""Sections 1.4.1 and 2.4: BuildModelFromConfigStruct and every field of ModelStructConfig."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conformance import oracle
from tests.conformance.server import (
    CACHE_OUT,
    INVALID,
    IO,
    LIMIT,
    MEMORY,
    OK,
    PARAM,
    Server,
    array_of,
    request,
)
from tests.conformance.suite import add, case

PROMPT = [5, 6, 7]
CONFIG = "ModelStructConfig."


def _refusal(status: int, changes: dict[str, Any]) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        name = changes.get("model_name", "conformance-refused")
        assert s.build(**({"name": name} | {k: v for k, v in changes.items() if k != "model_name"})) == status
        assert not s.answer("GetModelInformation", pb.ModelName(model_name=name)).model_info

    return run


def _serves(changes: dict[str, Any]) -> Callable[[Server], None]:
    """Whatever the setting is, the tokens are those of the weights."""

    def run(s: Server) -> None:
        with s.model(**changes) as name:
            tokens = s.generate(PROMPT, model=name)
            assert len(tokens) == 8
            oracle.check_greedy(s.reference_path, PROMPT, tokens)

    return run


REFUSED: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("1.4.1 #2", "model_path empty", IO, {"model_path": ""}),
    ("1.4.1 #2", "model_path missing", IO, {"model_path": "missing"}),
    ("1.4.1 #2", "model_path outside the root", IO, {"model_path": "/etc/passwd"}),
    ("1.4.1 #2", "model_path leads out of the root", IO, {"model_path": "../../../../etc"}),
    ("1.4.1 #9", "weights_path missing", IO, {"weights_path": "missing"}),
    ("1.4.1 #9", "weights_path outside the root", IO, {"weights_path": "/etc/passwd"}),
    ("1.4.1 #3", "compute_unit without ids", PARAM, {"compute_unit": "CPU"}),
    ("1.4.1 #3", "compute_unit of an unknown device", PARAM, {"compute_unit": "TPU:0"}),
    ("1.4.1 #3", "compute_unit with an id that is no number", PARAM, {"compute_unit": "CPU:x"}),
    ("1.4.1 #3", "compute_unit with an empty list", PARAM, {"compute_unit": "CPU:"}),
    ("1.4.1 #3", "compute_unit in lower case", PARAM, {"compute_unit": "cpu:0"}),
    ("1.4.1 #5", "cache_span_size 8", PARAM, {"cache_span_size": 8}),
    ("1.4.1 #5", "cache_span_size negative", PARAM, {"cache_span_size": -16}),
    ("1.4.1 #5", "cache_span_num_init negative", PARAM, {"cache_span_num_init": -1}),
    ("1.4.1 #5", "cache_span_num_grow negative", PARAM, {"cache_span_num_grow": -1}),
    ("1.4.1 #6", "matmul_precision unknown", PARAM, {"matmul_precision": "best"}),
    ("1.4.1 #7", "engine_max_length 2", PARAM, {"engine_max_length": 2}),
    ("1.4.1 #7", "engine_max_length negative", PARAM, {"engine_max_length": -1}),
    ("1.4.1 #7", "engine_max_batch negative", PARAM, {"engine_max_batch": -1}),
    ("1.4.1 #10", "model_name empty", PARAM, {"model_name": ""}),
    ("2.4", "cache_mode 3", PARAM, {"cache_mode": 3}),
    ("2.4", "prefix_cache_ttl negative", PARAM, {"prefix_cache_ttl": -1}),
    ("2.4", "num_threads negative", PARAM, {"num_threads": -1}),
    ("2.4", "lora_names with one that is missing", PARAM, {"lora_names": ["conformance-no-such-adapter"]}),
)
ACCEPTED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("2.4", "weights_path empty", {"weights_path": ""}),
    ("2.4", "compute_unit CPU:0", {"compute_unit": "CPU:0"}),
    ("2.4", "compute_unit empty is any device", {"compute_unit": ""}),
    *(("2.4", f"cache_span_size {n}", {"cache_span_size": n}) for n in (0, 16, 32, 64, 128)),
    *(("2.4", f"cache_span_num_grow {n} changes nothing", {"cache_span_num_grow": n}) for n in (0, 5)),
    *(("2.4", f"matmul_precision {p or 'empty'}", {"matmul_precision": p}) for p in ("", "highest", "high")),
    ("2.4", "engine_max_batch 0 is the default", {"engine_max_batch": 0}),
    ("2.4", "engine_max_length 11", {"engine_max_length": 11}),
    ("2.4", "is_lora_cfg is ignored", {"is_lora_cfg": True}),
    *(("2.4", f"prefill_mode {n} is advice", {"prefill_mode": n}) for n in (0, 10, 11, 99)),
    ("2.4", "text_graph is ignored", {"text_graph": True}),
    *(("2.4", f"num_threads {n}", {"num_threads": n}) for n in (0, 1, 2)),
    *(("2.4", f"enable_prefix_cache {on} ttl {ttl}", {"enable_prefix_cache": on, "prefix_cache_ttl": ttl})
      for on in (False, True) for ttl in (0, 300)),
    *(("2.4", f"swap_threshold {n}", {"swap_threshold": n}) for n in (-1, 0, 1 << 20)),
)  # fmt: skip


def _fields(changes: dict[str, Any]) -> tuple[str, ...]:
    names = tuple(CONFIG + name for name in changes)
    return (*names, "LoraNames.names") if "lora_names" in changes else names


for _spec, _name, _status, _changes in REFUSED:
    add(_spec, f"{_name} {_status}", _fields(_changes), _refusal(_status, _changes))
for _spec, _name, _changes in ACCEPTED:
    add(_spec, _name, _fields(_changes), _serves(_changes))


@case("2.4", CONFIG + "weights_path")
def weights_path_the_same_as_model_path(s: Server) -> None:
    with s.model(weights_path=s.model_path) as name:
        assert s.generate(PROMPT, model=name) == s.generate(PROMPT)


@case("2.4", CONFIG + "matmul_precision", CONFIG + "model_path")
def highest_precision_gives_the_tokens_of_the_stored_weights(s: Server) -> None:
    with s.model(matmul_precision="highest") as name:
        oracle.check_greedy(s.reference_path, PROMPT, s.generate(PROMPT, model=name, new=32))


#: matmul_precision -> how far its logits are from those of fp32, as a share of the largest: low, high.
#: Hardware without a format falls back to a higher precision, so only our own formats must differ.
ROUNDING = {
    "highest": (0, 1e-4),
    "high": (0, 1e-3),
    "medium_fp16": (0, 0.01),
    "medium_bf16": (0, 0.05),
    "medium": (0, 0.05),
    "int8": (1e-3, 0.2),
    "int4": (0.05, 1.5),
}


@case("2.4.5", CONFIG + "matmul_precision")
def each_matmul_precision_rounds_as_far_as_its_name_says(s: Server) -> None:
    expected = oracle.logits(s.reference_path, PROMPT)[-1]
    found = {precision: _distance(s, precision, expected) for precision in ROUNDING}
    assert [p for p, (low, high) in ROUNDING.items() if not low <= found[p] <= high] == [], found


def _distance(s: Server, precision: str, expected: Any) -> float:
    """Of the logits after PROMPT, relative to the largest."""
    with s.model(matmul_precision=precision) as name:
        live = s.start(PROMPT, model=name, infer_type=pb.ModelInference)
        logits = array_of(live.elements().tensors_from_model_inference.tensor_map["logits"])[0]
        assert live.release() == OK
    return float(abs(logits - expected).max() / abs(expected).max())


@case("2.4.8, 9 #12", CONFIG + "engine_max_length")
def engine_max_length_limits_requests(s: Server) -> None:
    with s.model(engine_max_length=32) as name:
        assert len(s.generate(PROMPT, model=name, max_length=32)) == 29
        assert s.refused(request(name, PROMPT, max_length=33)) == LIMIT


@case("2.4.8", CONFIG + "engine_max_length")
def engine_max_length_zero_is_the_models_own(s: Server) -> None:
    own = oracle.reference(s.reference_path).config.max_position_embeddings
    with s.model(engine_max_length=0) as name:
        assert s.refused(request(name, PROMPT, max_length=own + 1)) == LIMIT
        assert s.start(PROMPT, model=name, max_length=0).release() == OK


@case("2.4.9", CONFIG + "engine_max_batch", "AsEngineStat.running_request", "AsEngineStat.pendding_request")
def engine_max_batch_limits_what_runs_and_the_rest_waits(s: Server) -> None:
    with s.model(engine_max_batch=1, engine_max_length=0) as name:
        live = [s.start([5 + i], model=name, max_length=0) for i in range(8)]
        stat = s.stat(name)
        while stat.running_request + stat.pendding_request < 8:  # some are on their way to a worker
            stat = s.stat(name)
        assert 1 <= stat.running_request < 8
        assert stat.running_request + stat.pendding_request == 8
        assert [r.release() for r in live] == [OK] * 8


@case("2.4.7", CONFIG + "swap_threshold")
def swap_threshold_below_zero_forbids_Unload(s: Server) -> None:
    with s.model(swap_threshold=-1, start=False) as name:
        assert s.status("UnloadModelFromDeviceMemory", name) == INVALID


@case("2.4.12", CONFIG + "cache_span_num_init", CONFIG + "cache_span_num_grow", "AsEngineStat.total_span")
def cache_span_num_init_fixes_the_number_of_frames_of_each_worker(s: Server) -> None:
    span = 2 * oracle.reference(s.reference_path).config.num_hidden_layers  # frames of one span of tokens
    totals = []
    for init, spans in ((4 * span, 4), (9 * span - 1, 8)):  # whole spans alone can be used
        with s.model(cache_span_num_init=init, cache_span_num_grow=7, cache_span_size=16) as name:
            oracle.check_greedy(s.reference_path, PROMPT, s.generate(PROMPT, model=name, new=40))
            stat = s.stat(name)
            assert stat.total_span % (spans * span) == 0 and stat.free_token == stat.total_span // span * 16
            assert s.refused(request(name, [5] * 500, max_length=600)) == CACHE_OUT, "no more than that"
            totals.append(stat.total_span)
    assert totals[1] == 2 * totals[0]


@case("2.4.12", CONFIG + "cache_span_num_init", "AsStatus.as_status")
def frames_that_no_memory_holds_4(s: Server) -> None:
    for init in (1, 1 << 30):
        assert s.build("conformance-refused", cache_span_num_init=init) == MEMORY


@case("2.4.14", CONFIG + "cache_mode", "AsEngineStat.span_size")
def cache_mode_shrinks_a_frame_as_the_formulas_say(s: Server) -> None:
    config = oracle.reference(s.reference_path).config
    heads, size, tokens = config.num_key_value_heads, config.head_dim, 16
    scales = 2 * tokens * heads * 4
    frames = {1: tokens * heads * size + scales, 2: tokens * heads * size // 2 + scales}
    for mode, frame in frames.items():
        with s.model(cache_mode=mode, cache_span_size=tokens) as name:
            assert s.stat(name).span_size == frame
            assert len(s.generate(PROMPT, model=name)) == 8


HITS = tuple(f"AsEngineStat.prefix_cache_{n}" for n in ("hit_token", "miss_token", "hit_rate", "miss_rate"))


@case("2.4.15", CONFIG + "enable_prefix_cache", CONFIG + "prefix_cache_ttl", *HITS)
def a_prefix_is_reused_and_counted(s: Server) -> None:
    prompt = [3 + i % 90 for i in range(70)]
    with s.model(enable_prefix_cache=True, prefix_cache_ttl=300) as name:
        outputs = [s.generate(prompt, model=name) for _ in range(8)]
        assert outputs == [outputs[0]] * 8
        stat = s.stat(name)
    assert stat.prefix_cache_hit_token >= 64 and stat.prefix_cache_hit_token % 16 == 0
    assert stat.prefix_cache_hit_token + stat.prefix_cache_miss_token == stat.total_prefill_token == 8 * 70
    total = stat.prefix_cache_hit_token + stat.prefix_cache_miss_token
    assert stat.prefix_cache_hit_rate == pytest.approx(stat.prefix_cache_hit_token / total)
    assert stat.prefix_cache_miss_rate == pytest.approx(1 - stat.prefix_cache_hit_rate)


@case("2.4.15", CONFIG + "enable_prefix_cache", "AsEngineStat.prefix_cache_hit_token")
def without_prefix_cache_nothing_is_reused(s: Server) -> None:
    prompt = [3 + i % 90 for i in range(70)]
    with s.model(enable_prefix_cache=False, prefix_cache_ttl=300) as name:
        assert s.generate(prompt, model=name) == s.generate(prompt, model=name)
        assert s.stat(name).prefix_cache_hit_token == 0


@case("2.4.16", CONFIG + "prefix_cache_ttl", "AsEngineStat.prefix_cache_hit_token")
def prefix_cache_ttl_zero_reuses_only_among_live_requests(s: Server) -> None:
    prompt = [3 + i % 90 for i in range(70)]
    with s.model(enable_prefix_cache=True, prefix_cache_ttl=0) as name:
        outputs = [s.generate(prompt, model=name) for _ in range(4)]
        assert outputs == [outputs[0]] * 4
        assert s.stat(name).prefix_cache_hit_token == 0


@case("1.4.1", CONFIG + "model_path", "AsStatus.as_status")
def the_first_of_several_faults_is_the_one_that_upstream_names(s: Server) -> None:
    def status(**fields: Any) -> int:
        answer = s.answer("BuildModelFromConfigStruct", pb.ModelStructConfig(**fields))
        return int(answer.as_status)

    assert status() == IO, "no path, no name"
    assert status(compute_unit="TPU:0", cache_span_size=8) == IO
    assert status(model_path=s.model_path) == PARAM, "no name"


@case("1.4.1", CONFIG + "model_name")
def several_models_at_once(s: Server) -> None:
    with s.model(engine_max_length=32) as small, s.model(engine_max_length=64) as large:
        assert s.refused(request(small, PROMPT, max_length=48)) == LIMIT
        assert len(s.generate(PROMPT, model=large, max_length=48)) == 45


@case("1.4.1", CONFIG + "engine_max_length")
def a_rebuild_takes_the_new_configuration(s: Server) -> None:
    with s.model(engine_max_length=32, start=False) as name:
        assert s.build(name, engine_max_length=64) == OK
        assert s.status("StartModel", name) == OK
        assert len(s.generate(PROMPT, model=name, max_length=64)) == 61


@case("1.4.1", "AsStatus.as_status", CONFIG + "model_path")
def a_rebuild_that_fails_leaves_the_old_model(s: Server) -> None:
    with s.model(start=False) as name:
        assert s.build(name, model_path="missing") == IO
        assert s.status("StartModel", name) == OK
        assert len(s.generate(PROMPT, model=name)) == 8


@case("1.4.1", CONFIG + "model_name")
def a_caller_that_gives_up_is_joined_by_an_identical_Build(s: Server) -> None:
    name = "conformance-impatient"
    s.release_model(name)
    stub_call = s.config(name)
    for _ in range(3):
        try:
            s.ask("BuildModelFromConfigStruct", stub_call, timeout_s=0.004)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert s.build(name) == OK
    assert s.status("StartModel", name) == OK
    assert len(s.generate(PROMPT, model=name)) == 8
    s.release_model(name)
