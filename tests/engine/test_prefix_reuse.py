"""An engine with a prefix cache gives the same tokens as one without, and computes fewer of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allspark_bus.catalogue import ModelRecord, ModelState
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.convert import model_config
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.sequence import NO_ROW
from allspark_workers.engine.step_plan import Row
from allspark_workers.engine.types import EmbeddingRun, EngineRequest, Task
from allspark_workers.settings import WorkerSettings
from engine_helpers import Collected, random_prompt, request, run_all

Maker = Callable[..., Engine]
SPAN = 16
NEW = 12
CACHED = {"span_size": SPAN, "enable_prefix_cache": True, "prefix_cache_ttl_s": 60.0}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def counted(engine: Engine) -> Iterator[list[Row]]:
    """Every row that goes through the model meanwhile."""
    rows: list[Row] = []
    runner = engine._runner
    assert runner is not None
    run = runner.run
    runner.run = lambda given, *rest: rows.extend(given) or run(given, *rest)  # type: ignore[method-assign]
    yield rows
    runner.run = run  # type: ignore[method-assign]


def prompt_tokens(rows: list[Row]) -> int:
    """How many prompt tokens were computed."""
    return sum(max(0, min(row.start + row.count, row.sequence.num_prompt) - row.start) for row in rows)


def sampled(name: str, prompt: list[int], seed: int = 3, new: int = NEW, **fields: Any) -> EngineRequest:
    fields = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 50,
        "seed": seed,
        "repetition_penalty": 1.1,
    } | fields
    return request(name, prompt, new, **fields)


SHARED = random_prompt(70, seed=1)
PROMPTS = [
    SHARED + random_prompt(9, seed=2),
    SHARED + random_prompt(9, seed=3),
    SHARED[:48],
    SHARED[:40] + random_prompt(30, seed=4),
    SHARED + random_prompt(9, seed=2),
    random_prompt(33, seed=5),
]


def requests() -> list[EngineRequest]:
    return [sampled(f"r{i}", prompt, seed=i) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(tiny: Any) -> dict[str, list[int]]:
    """What an engine without a cache generates for each request alone."""
    from allspark_workers.engine.types import ModelConfig
    from allspark_workers.models.loader import load_model

    config = ModelConfig(str(tiny.path("llama-tied")), num_threads=1, dtype="fp32", span_size=SPAN)
    engine = Engine(load_model(config), config)
    engine.start()
    return {item.request_id: run_all(engine, [item]).tokens[item.request_id] for item in requests()}


def test_one_after_the_other_each_computes_what_is_new(
    make_engine: Maker, expected: dict[str, list[int]]
) -> None:
    engine = make_engine(**CACHED)
    computed = []
    for item in requests():
        with counted(engine) as rows:
            assert run_all(engine, [item]).tokens[item.request_id] == expected[item.request_id]
        computed.append(prompt_tokens(rows))
    # Full spans that came before, the last token excepted: 0, 64, 32, 32, 64 and 0 tokens.
    assert computed == [79, 15, 16, 38, 15, 33]
    stat = engine.stat()
    assert (stat.prefix_cache_hit_token, stat.prefix_cache_miss_token) == (192, sum(computed))
    assert stat.total_prefill_token == sum(map(len, PROMPTS))
    assert stat.prefix_cache_hit_rate == pytest.approx(192 / sum(map(len, PROMPTS)))
    assert stat.prefix_cache_hit_rate + stat.prefix_cache_miss_rate == pytest.approx(1.0)
    frames = 2 * engine.facts.num_layers
    assert stat.used_span == len(engine._scheduler.prefix) * frames, "what is cached is used"  # type: ignore[arg-type]
    assert stat.used_span + stat.free_span == stat.total_span


@pytest.mark.parametrize("chunk", [5, 64])
def test_at_once_they_share_what_the_first_has_computed(
    chunk: int, make_engine: Maker, expected: dict[str, list[int]]
) -> None:
    engine = make_engine(prefill_chunk=chunk, **CACHED)
    with counted(engine) as rows:
        assert run_all(engine, requests()).tokens == expected
    assert prompt_tokens(rows) < 0.7 * sum(map(len, PROMPTS))
    stat = engine.stat()
    assert stat.prefix_cache_miss_token == prompt_tokens(rows)
    assert stat.prefix_cache_hit_token + stat.prefix_cache_miss_token == sum(map(len, PROMPTS))


@pytest.mark.parametrize(("dtype", "cache_mode"), [("bf16", 0), ("fp32", 1), ("fp32", 2)])
def test_cached_spans_of_every_format_give_the_same_tokens(
    dtype: str, cache_mode: int, make_engine: Maker
) -> None:
    options = {"dtype": dtype, "cache_mode": cache_mode, "span_size": SPAN}
    plain = run_all(make_engine(**options), requests()[:2]).tokens
    engine = make_engine(**(CACHED | options), prefill_chunk=30)
    for _ in range(2):
        assert run_all(engine, requests()[:2]).tokens == plain
    assert engine.stat().prefix_cache_hit_token >= 2 * 64


def test_without_a_cache_nothing_is_kept_and_nothing_counted(make_engine: Maker) -> None:
    engine = make_engine(span_size=SPAN)
    run_all(engine, requests()[:2])
    stat = engine.stat()
    assert (stat.prefix_cache_hit_token, stat.prefix_cache_miss_token, stat.used_span) == (0, 0, 0)
    assert stat.prefix_cache_hit_rate == stat.prefix_cache_miss_rate == 0.0


def test_the_time_to_live_is_kept_by_an_idle_engine_too(make_engine: Maker) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, **CACHED)
    run_all(engine, [sampled("a", SHARED)])
    clock.now_s += 59.9
    assert not engine.has_work()
    run_all(engine, [sampled("b", SHARED)])
    assert engine.stat().prefix_cache_hit_token == 64
    clock.now_s += 59.9
    assert not engine.has_work() and engine.stat().used_span > 0
    clock.now_s += 0.2
    assert engine.has_work() and engine.step() == []
    assert not engine.has_work() and engine.stat().used_span == 0
    run_all(engine, [sampled("c", SHARED)])
    assert engine.stat().prefix_cache_hit_token == 64


def test_a_time_to_live_of_zero_shares_among_live_requests_only(make_engine: Maker) -> None:
    engine = make_engine(**(CACHED | {"prefix_cache_ttl_s": 0.0}), prefill_chunk=80)
    run_all(engine, [sampled("a", SHARED), sampled("b", SHARED, seed=4)])
    # The second one had computed ten tokens in the step in which the first computed all.
    assert engine.stat().prefix_cache_hit_token == 54
    assert engine.stat().used_span == 0
    run_all(engine, [sampled("c", SHARED)])
    assert engine.stat().prefix_cache_hit_token == 54


def span_bytes(engine: Engine) -> int:
    return 2 * engine.facts.num_layers * engine.facts.span_bytes


def test_cached_spans_give_way_and_preempted_requests_come_back_to_theirs(
    make_engine: Maker, expected: dict[str, list[int]]
) -> None:
    """A pool that holds one and a half of the requests: they evict what is cached and push each other out."""
    bytes_per_span = span_bytes(make_engine(span_size=SPAN))
    engine = make_engine(kv_bytes=9 * bytes_per_span, **CACHED)
    for item in requests():
        engine.submit(item)
    collected = Collected()
    step = 0
    while engine.has_work():
        collected.add(engine.step())
        engine.check()
        step += 1
        if step % 7 == 3 and len(engine._scheduler.running) > 1:
            engine._scheduler.preempt(engine._scheduler.running[-1])
            engine.check()
    assert collected.tokens == expected
    assert engine._scheduler.num_preemptions > 2
    assert engine.stat().prefix_cache_hit_token > 0
    assert engine._scheduler.ledger.free == 9, "what is cached may be had"


def test_a_request_for_the_whole_pool_is_not_kept_out_by_the_cache(make_engine: Maker) -> None:
    bytes_per_span = span_bytes(make_engine(span_size=SPAN))
    engine = make_engine(kv_bytes=6 * bytes_per_span, **CACHED)
    run_all(engine, [sampled("a", SHARED)])
    assert engine.stat().free_span < engine.stat().total_span
    assert run_all(engine, [sampled("b", random_prompt(85, seed=9), new=10)]).finish("b") == "length"


@pytest.mark.parametrize("moment", ["inbox", "waiting", "prefill", "decode", "held"])
def test_cancelling_one_leaves_the_shared_spans_to_the_other(moment: str, make_engine: Maker) -> None:
    engine = make_engine(prefill_chunk=20, max_batch=1 if moment == "waiting" else 4, **CACHED)
    run_all(engine, [sampled("first", SHARED)])
    quiet = run_all(engine, [sampled("x", PROMPTS[1], seed=1)]).tokens["x"]
    engine.submit(sampled("stays", PROMPTS[1], seed=1))
    collected = Collected()
    collected.add(engine.step())
    engine.submit(sampled("goes", PROMPTS[0] + random_prompt(40, seed=8), seed=9))
    for _ in range({"inbox": 0, "waiting": 2, "prefill": 1, "decode": 6, "held": 6}[moment]):
        collected.add(engine.step())
    if moment == "held":
        engine.hold("goes")
        collected.add(engine.step())
    place = engine._scheduler.get("goes")
    assert (place is None) == (moment == "inbox")
    if place is not None:
        assert (place.row == NO_ROW) == (moment == "waiting")
        assert (place.num_generated > 0) == (moment in ("decode", "held"))
    engine.cancel("goes")
    collected.add(engine.step())
    assert collected.finish("goes") == "stopped"
    engine.check()
    while engine.has_work():
        collected.add(engine.step())
        engine.check()
    assert collected.tokens["stays"] == quiet
    assert engine._scheduler.ledger.used == 0


def test_a_failing_request_caches_nothing(make_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(**CACHED)
    assert engine._runner is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda *_: 1 / 0)
        assert run_all(engine, [sampled("a", SHARED)]).finish("a") == "error"
    assert engine.stat().used_span == 0
    run_all(engine, [sampled("b", SHARED)])
    assert engine.stat().prefix_cache_hit_token == 0


def test_a_resumed_request_begins_with_the_cached_prompt(
    make_engine: Maker, expected: dict[str, list[int]]
) -> None:
    engine = make_engine(**CACHED)
    run_all(engine, requests()[:1])
    done = expected["r0"][:5]
    with counted(engine) as rows:
        item = sampled("r0", PROMPTS[0], seed=0, epoch=2, generated=done)
        assert run_all(engine, [item]).tokens["r0"] == expected["r0"][5:]
    assert prompt_tokens(rows) == 15


def test_several_sequences_of_one_request_begin_with_the_cached_prompt(make_engine: Maker) -> None:
    def several(name: str, **fields: Any) -> EngineRequest:
        return sampled(name, PROMPTS[0], num_return_sequences=3, seeds=(1, 2, 3), **fields)

    plain = run_all(make_engine(span_size=SPAN), [several("a")])
    engine = make_engine(**CACHED)
    run_all(engine, [sampled("first", SHARED)])
    with counted(engine) as rows:
        got = run_all(engine, [several("a")])
    assert got.tokens == plain.tokens
    for name, tensor in plain.ends["a"].tensors.items():
        np.testing.assert_array_equal(got.ends["a"].tensors[name], tensor)
    assert prompt_tokens(rows) == 15 + 2, "the two others share all but the last token"


@pytest.mark.parametrize("length", [48, 79])
def test_beam_search_begins_with_the_cached_prompt(length: int, make_engine: Maker) -> None:
    def beams(name: str) -> EngineRequest:
        return request(name, PROMPTS[0][:length], NEW, num_beams=3, num_return_sequences=2)

    plain = run_all(make_engine(span_size=SPAN), [beams("a")])
    engine = make_engine(**CACHED)
    run_all(engine, [sampled("first", SHARED)])
    for name in ("a", "b"):
        got = run_all(engine, [beams(name)])
        assert got.tokens[name] == plain.tokens["a"]
        np.testing.assert_array_equal(
            got.ends[name].tensors["sequence_scores"], plain.ends["a"].tensors["sequence_scores"]
        )
    assert engine.stat().prefix_cache_hit_token >= 2 * 32


def test_preempted_beams_do_not_mix_their_spans_with_those_of_another_request(make_engine: Maker) -> None:
    """All beams hold spans that the first is about to compute when another request computes the same."""
    item = request("beams", PROMPTS[0], NEW, num_beams=3)
    plain = run_all(make_engine(span_size=SPAN), [item]).tokens["beams"]
    engine = make_engine(**(CACHED | {"prefix_cache_ttl_s": 0.0}), prefill_chunk=48)
    engine.submit(item)
    collected = Collected()
    for _ in range(6):
        collected.add(engine.step())
    scheduler, runner = engine._scheduler, engine._runner
    assert runner is not None and len(scheduler.running) == 3
    scheduler.preempt(scheduler.running[0])
    assert scheduler.ledger.used == scheduler.ledger.num_idle == 0
    for frames in (*runner._cache.keys, *runner._cache.values):
        frames.fill_(float("nan"))
    engine.submit(sampled("ahead", SHARED[:40], priority=1))
    while engine.has_work():
        collected.add(engine.step())
        engine.check()
    assert collected.tokens["beams"] == plain


def test_a_probe_fills_the_cache(make_engine: Maker, expected: dict[str, list[int]]) -> None:
    engine = make_engine(**CACHED)
    probe = request("probe", PROMPTS[0], 1)
    probe.task = Task.PROBE
    assert run_all(engine, [probe]).finish("probe") == "probed"
    with counted(engine) as rows:
        assert run_all(engine, requests()[:1]).tokens["r0"] == expected["r0"]
    assert prompt_tokens(rows) == 15


def test_inference_computes_every_position(make_engine: Maker) -> None:
    def infer(name: str) -> EngineRequest:
        item = request(name, SHARED, 1)
        item.task = Task.INFER
        return item

    engine = make_engine(**CACHED)
    plain = run_all(make_engine(span_size=SPAN), [infer("a")]).ends["a"].tensors
    run_all(engine, [sampled("first", SHARED)])
    got = run_all(engine, [infer("a")]).ends["a"].tensors
    assert set(got) == set(plain)
    for name in plain:
        np.testing.assert_array_equal(got[name], plain[name])


def test_other_embeddings_under_the_same_ids_share_nothing(make_engine: Maker) -> None:
    hidden = make_engine().facts.hidden_size
    rng = np.random.default_rng(7)
    values = [rng.normal(size=(20, hidden)).astype(np.float32) for _ in range(2)]

    def given(name: str, which: int) -> EngineRequest:
        item = request(name, SHARED, NEW)
        item.embeddings = (EmbeddingRun(4, values[which]),)
        item.content_salt = bytes([which + 1])
        return item

    plain_engine = make_engine(span_size=SPAN)
    plain = [run_all(plain_engine, [item]).tokens["a"] for item in (given("a", 0), given("a", 1))]
    text = run_all(plain_engine, [request("a", SHARED, NEW)]).tokens["a"]
    assert len({tuple(tokens) for tokens in (*plain, text)}) == 3
    engine = make_engine(**CACHED)
    for which in (0, 1, 0, 1):
        assert run_all(engine, [given("a", which)]).tokens["a"] == plain[which]
        assert run_all(engine, [request("b", SHARED, NEW)]).tokens["b"] == text
    assert engine.stat().prefix_cache_hit_token == 5 * 64


def test_what_was_pushed_out_comes_back_from_host_memory_bit_for_bit(
    make_engine: Maker, expected: dict[str, list[int]]
) -> None:
    bytes_per_span = span_bytes(make_engine(span_size=SPAN))
    small = {"kv_bytes": 7 * bytes_per_span}
    engine = make_engine(**small, **CACHED, prefix_host_bytes=20 * bytes_per_span)
    bare = make_engine(**small, **CACHED)
    others = [sampled(f"o{i}", random_prompt(90, seed=20 + i), new=2) for i in range(2)]
    for which in (engine, bare):
        for item in (requests()[0], *others, requests()[0]):
            collected = run_all(which, [item])
            if item.request_id == "r0":
                assert collected.tokens["r0"] == expected["r0"]
    assert engine.stat().prefix_cache_hit_token == 64
    assert bare.stat().prefix_cache_hit_token == 0


def test_the_fields_of_build_and_the_workers_setting_reach_the_engine(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    message = pb.ModelStructConfig(
        model_path=str(tmp_path / "m"), enable_prefix_cache=True, prefix_cache_ttl=17, cache_mode=1
    )
    record = ModelRecord("m", message.SerializeToString(), ModelState.BUILT)
    settings = WorkerSettings.load([f"--model-root={tmp_path}", "--prefix-host-memory=3MiB"], {})
    config = model_config(record, settings)
    assert (config.enable_prefix_cache, config.prefix_cache_ttl_s) == (True, 17)
    assert config.prefix_host_bytes == 3 << 20
    bare = model_config(
        ModelRecord(
            "m", pb.ModelStructConfig(model_path=str(tmp_path / "m")).SerializeToString(), ModelState.BUILT
        ),
        WorkerSettings.load([f"--model-root={tmp_path}"], {}),
    )
    assert (bare.enable_prefix_cache, bare.prefix_cache_ttl_s, bare.prefix_host_bytes) == (False, 0, 0)
