"""ModelInference, probes and rich text: hidden states, prompts without answers, given embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from allspark_workers.engine.content import content_salt
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import EmbeddingRun, EngineRequest, StepOutput, Task
from engine_helpers import TinyModels, random_prompt, request, run_all

Maker = Callable[..., Engine]
HIDDEN, PLACEHOLDER = 64, 99


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2", "qwen3"])
def test_hidden_states_and_logits_equal_transformers(
    variant: str, tiny: TinyModels, make_engine: Maker
) -> None:
    prompts = {f"p{n}": random_prompt(n, seed=2) for n in (1, 16, 33, 100)}
    engine = make_engine(variant, prefill_chunk=24, span_size=16)
    asked = [request(name, ids, 1) for name, ids in prompts.items()]
    for item in asked:
        item.task = Task.INFER
    got = run_all(engine, [request("a", random_prompt(40), 20), *asked, request("b", random_prompt(7), 30)])
    for name, ids in prompts.items():
        with torch.inference_mode():
            want = tiny.reference(variant)(torch.tensor([ids]), output_hidden_states=True)
        tensors = got.ends[name].tensors
        assert sorted(tensors) == ["last_hidden_state", "logits"]
        assert all(value.dtype == np.float32 for value in tensors.values())
        np.testing.assert_allclose(tensors["last_hidden_state"], want.hidden_states[-1], atol=2e-4)
        np.testing.assert_allclose(tensors["logits"], want.logits[:, -1], atol=2e-4)
        assert got.tokens[name] == [] and got.finish(name) == "inferred"
    assert engine.stat().used_span == 0


def test_inference_does_not_depend_on_neighbours_chunks_and_preemption(make_engine: Maker) -> None:
    def asked() -> EngineRequest:
        item = request("a", random_prompt(70), 1)
        item.task = Task.INFER
        return item

    alone = run_all(make_engine(), [asked()]).ends["a"].tensors
    engine = make_engine(prefill_chunk=16, span_size=16)
    engine.submit(request("b", random_prompt(9), 30))
    engine.submit(asked())
    outputs: list[StepOutput] = []
    for step in range(100):
        if not engine.has_work():
            break
        outputs += engine.step()
        sequence = engine._scheduler.get("a")
        if step in (1, 3) and sequence is not None:
            engine._scheduler.preempt(sequence)
    (end,) = [out for out in outputs if out.request_id == "a"]
    assert engine._scheduler.num_preemptions == 2
    for name, value in alone.items():
        assert np.array_equal(end.tensors[name], value), name


def test_a_probe_computes_its_prompt_and_no_token(
    make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(prefill_chunk=16)
    sampled: list[str] = []
    original = engine._runner._sampler.sample  # type: ignore[union-attr]

    def sample(ops: Any, logits: Any, rows: list[Any], masks: Any) -> list[int]:
        sampled.extend(row.request_id for row in rows)
        return original(ops, logits, rows, masks)

    monkeypatch.setattr(engine._runner._sampler, "sample", sample)  # type: ignore[union-attr]
    probes = [request(f"p{n}", random_prompt(n), 5, num_return_sequences=2) for n in (1, 17, 50)]
    for item in probes:
        item.task = Task.PROBE
    got = run_all(engine, [*probes, request("a", random_prompt(8), 3)])
    for item in probes:
        end = got.ends[item.request_id]
        assert (end.tokens, end.position, str(end.finish), dict(end.tensors)) == ([], 0, "probed", {})
    assert set(sampled) == {"a"}
    assert engine.stat().total_prefill_token == 1 + 17 + 50 + 8
    assert engine.stat().used_span == 0


def rich(name: str, runs: tuple[EmbeddingRun, ...], **fields: Any) -> EngineRequest:
    item = request(name, PROMPT, 12, **fields)
    item.embeddings, item.content_salt = runs, content_salt(runs)
    return item


PROMPT = [5, 6, *[PLACEHOLDER] * 20, 7, 8, 9, *[PLACEHOLDER] * 31, 10]


def two_runs(seed: int) -> tuple[EmbeddingRun, ...]:
    rng = np.random.default_rng(seed)
    values = [rng.normal(0, 0.3, (rows, HIDDEN)).astype(np.float32) for rows in (20, 31)]
    return (EmbeddingRun(2, values[0]), EmbeddingRun(25, values[1]))


@torch.inference_mode()
def reference_tokens(model: Any, runs: tuple[EmbeddingRun, ...], count: int) -> list[int]:
    embedded = model.get_input_embeddings()(torch.tensor([PROMPT])).clone()
    for run in runs:
        embedded[0, run.start : run.start + len(run.values)] = torch.from_numpy(run.values)
    out = model.generate(
        inputs_embeds=embedded,
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0].tolist()
    return tokens


def test_given_embeddings_replace_those_of_the_placeholder(tiny: TinyModels, make_engine: Maker) -> None:
    model = tiny.reference("qwen2")
    want = [reference_tokens(model, two_runs(seed), 12) for seed in (1, 2)]
    assert want[0] != want[1] != reference_tokens(model, (), 12)
    for chunk in (512, 9):
        engine = make_engine("qwen2", prefill_chunk=chunk, span_size=16)
        got = run_all(
            engine,
            [
                request("text", PROMPT, 12),
                *[rich(f"rich {seed}", two_runs(seed)) for seed in (1, 2)],
                rich("resumed", two_runs(1), generated=want[0][:5]),
                rich("twice", two_runs(1), num_return_sequences=2),
            ],
        )
        assert [got.tokens["rich 1"], got.tokens["rich 2"]] == want
        assert got.tokens["resumed"] == want[0][5:]
        assert got.tokens["twice"] == got.ends["twice"].tensors["sequence_1"].tolist() == want[0]
        assert got.tokens["text"] == reference_tokens(model, (), 12)


def test_the_salt_tells_contents_apart() -> None:
    runs = two_runs(1)
    moved = (runs[0], EmbeddingRun(26, runs[1].values))
    changed = (runs[0], EmbeddingRun(25, np.nextafter(runs[1].values, np.float32(9))))
    reshaped = (EmbeddingRun(2, runs[0].values.reshape(10, 2 * HIDDEN)), runs[1])
    salts = {content_salt(r) for r in (runs, moved, changed, reshaped, runs[:1])}
    assert len(salts) == 5 and all(len(salt) == 16 for salt in salts)
    assert content_salt(two_runs(1)) == content_salt(runs) and content_salt(()) == b""


@pytest.mark.parametrize("start, rows, width", [(50, 8, HIDDEN), (10, 3, HIDDEN), (40, 2, HIDDEN - 1)])
def test_embeddings_that_do_not_fit_are_refused(
    start: int, rows: int, width: int, make_engine: Maker
) -> None:
    runs = (two_runs(1)[0], EmbeddingRun(start, np.zeros((rows, width), np.float32)))
    with pytest.raises(ValueError, match="embeddings"):
        make_engine("qwen2").submit(rich("a", runs))
