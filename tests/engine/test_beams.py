"""Beam search, token for token, against transformers on the same fp32 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from allspark_workers.engine.beam_candidates import beam_candidates
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.sharing import Gang
from allspark_workers.engine.types import EngineRequest
from engine_helpers import Collected, TinyModels, random_prompt, request, run_all
from transformers import GenerationMixin

Maker = Callable[..., Engine]
VARIANT = "qwen3"


@torch.inference_mode()
def reference_beams(
    model: Any, prompt: list[int], new_tokens: int, eos: int | None = None, **options: Any
) -> tuple[list[list[int]], list[float]]:
    """New tokens (eos included) and scores of the returned hypotheses, best first."""
    tokens = torch.tensor([prompt])
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_length=len(prompt) + new_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = [row[len(prompt) :] for row in out.sequences.tolist()]
    rows = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    return rows, out.sequences_scores.tolist()


def returned(collected: Collected, key: str) -> tuple[list[list[int]], list[float]]:
    """The same of an engine's output."""
    tensors = collected.ends[key].tensors
    scores = tensors["sequence_scores"]
    assert scores.dtype == np.float32
    others = [tensors[f"sequence_{i}"] for i in range(1, len(scores))]
    assert all(other.dtype == np.int64 for other in others) and len(tensors) == len(scores)
    return [collected.tokens[key], *[other.tolist() for other in others]], scores.tolist()


def beam_request(
    name: str, prompt: list[int], new_tokens: int, eos: int | None = None, **options: Any
) -> EngineRequest:
    return request(name, prompt, new_tokens, eos_token_id=eos, **options)


def assert_equal(got: tuple[list[list[int]], list[float]], want: tuple[list[list[int]], list[float]]) -> None:
    assert got[0] == want[0]
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_hypotheses_and_scores_equal_transformers(
    length_penalty: float, early_stopping: bool, tiny: TinyModels, make_engine: Maker
) -> None:
    """All searches in one batch; eos ids are chosen so that some end early and some never."""
    model = tiny.reference(VARIANT)
    engine = make_engine(VARIANT, prefill_chunk=16, span_size=16, max_batch=32)
    requests, expected, lengths = [], {}, set()
    for num_beams, num_return, size in ((2, 1, 1), (3, 3, 17), (4, 2, 33), (8, 8, 40)):
        prompt = random_prompt(size, seed=num_beams)
        options = {
            "num_beams": num_beams,
            "num_return_sequences": num_return,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
        }
        plain, _ = reference_beams(model, prompt, 16, None, **options)
        for eos in dict.fromkeys((None, plain[0][4], plain[-1][0])):
            name = f"{num_beams} beams, eos {eos}"
            requests.append(beam_request(name, prompt, 16, eos, **options))
            expected[name] = reference_beams(model, prompt, 16, eos, **options)
            lengths |= {len(row) for row in expected[name][0]}
    # A penalty of 2 rewards length so much that nothing ends early unless it is told to.
    assert len(lengths) > 3 or (length_penalty == 2 and not early_stopping), "choose other eos ids"
    got = run_all(engine, requests)
    for name, want in expected.items():
        assert_equal(returned(got, name), want)
    assert engine.stat().used_span == 0


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3},
        {"min_length": 36, "early_stopping": True, "length_penalty": -2.0},
        {"bad_words": True, "early_stopping": True},
    ],
    ids=str,
)
def test_penalties_and_bans_act_as_in_transformers(
    own: dict[str, Any], tiny: TinyModels, make_engine: Maker
) -> None:
    prompt = random_prompt(30, seed=3)
    model, beams = tiny.reference(VARIANT), {"num_beams": 4, "num_return_sequences": 2}
    plain, _ = reference_beams(model, prompt, 12, **beams)
    eos = plain[0][0] if "early_stopping" in own else None
    ends = {name: value for name, value in own.items() if name in ("early_stopping", "length_penalty")}
    plain, _ = reference_beams(model, prompt, 12, eos, **beams, **ends)
    if own.pop("bad_words", False):
        bad = [[plain[0][0]], plain[1][:2]]
        want = reference_beams(model, prompt, 12, eos, **beams, **own, bad_words_ids=bad)
        own["bad_words"] = bad
    else:
        want = reference_beams(model, prompt, 12, eos, **beams, **own)
    assert want[0] != plain
    got = run_all(make_engine(VARIANT), [beam_request("a", prompt, 12, eos, **beams, **own)])
    assert_equal(returned(got, "a"), want)


def test_drawn_beams_follow_transformers_given_the_same_noise(
    tiny: TinyModels, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers draws with torch.multinomial; here that gets the noise the engine uses (Gumbel top-k)."""
    from allspark_kernels.torch_ops.philox import gumbel
    from allspark_workers.engine.families import sequence_seed

    prompt, seed, num_beams = random_prompt(9, seed=4), 77, 3
    position = [len(prompt)]

    def multinomial(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        vocab = probs.shape[1] // num_beams
        ids = torch.arange(vocab)
        noise = [
            gumbel(ids, torch.full_like(ids, sequence_seed(seed, beam)), torch.full_like(ids, position[0]))
            for beam in range(num_beams)
        ]
        position[0] += 1
        return (probs.double().log() + torch.cat(noise)).topk(num_samples).indices

    options = {"temperature": 1.4, "top_k": 40, "top_p": 0.9}
    got = run_all(
        make_engine(VARIANT),
        [
            beam_request(
                "a",
                prompt,
                12,
                num_beams=num_beams,
                num_return_sequences=3,
                do_sample=True,
                seed=seed,
                **options,
            )
        ],
    )
    monkeypatch.setattr(torch, "multinomial", multinomial)
    original = GenerationMixin.generate

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **(kwargs | {"do_sample": True}))

    monkeypatch.setattr(type(tiny.reference(VARIANT)), "generate", drawing)
    want = reference_beams(
        tiny.reference(VARIANT), prompt, 12, num_beams=num_beams, num_return_sequences=3, **options
    )
    assert_equal(returned(got, "a"), want)


def searches() -> list[EngineRequest]:
    """Beams of several widths among other requests."""
    beams = [
        beam_request(
            f"beams {i}", random_prompt(30 + 9 * i, seed=i), 20, num_beams=2 + 2 * i, num_return_sequences=2
        )
        for i in range(3)
    ]
    others = [request(f"plain {i}", random_prompt(25 + i, seed=50 + i), 20) for i in range(4)]
    return [others[0], beams[0], others[1], beams[1], others[2], beams[2], others[3]]


@pytest.fixture
def undisturbed(make_engine: Maker) -> dict[str, Any]:
    """What each of the searches gives when it has an engine to itself."""
    engine = make_engine(VARIANT, span_size=16)
    found = {}
    for item in searches():
        alone = run_all(engine, [item])
        found[item.request_id] = results(alone, item.request_id)
    return found


def results(collected: Collected, key: str) -> Any:
    tensors = {name: value.tolist() for name, value in collected.ends[key].tensors.items()}
    return collected.tokens[key], tensors


def test_neighbours_and_chunks_do_not_matter(undisturbed: dict[str, Any], make_engine: Maker) -> None:
    got = run_all(make_engine(VARIANT, span_size=16, prefill_chunk=11), searches())
    assert {key: results(got, key) for key in undisturbed} == undisturbed


def test_beams_that_push_each_other_out_come_out_the_same(
    undisturbed: dict[str, Any], make_engine: Maker
) -> None:
    engine = make_engine(VARIANT, span_size=16)
    span_bytes = 2 * engine.facts.num_layers * engine.facts.span_bytes
    narrow = make_engine(VARIANT, span_size=16, kv_bytes=15 * span_bytes, max_batch=8)
    got = run_all(narrow, searches())
    assert narrow._scheduler.num_preemptions > 1
    assert {key: results(got, key) for key in undisturbed} == undisturbed


@pytest.mark.parametrize("when", [0, 2, 6, 15])
def test_a_search_pushed_out_in_the_middle_goes_on_where_it_was(
    when: int, undisturbed: dict[str, Any], make_engine: Maker
) -> None:
    engine = make_engine(VARIANT, span_size=16, prefill_chunk=13)
    engine.submit(next(item for item in searches() if item.request_id == "beams 2"))
    collected = Collected()
    for step in range(200):
        if not engine.has_work():
            break
        collected.add(engine.step())
        leader = engine._scheduler.get("beams 2")
        if step in (when + 4, when + 8) and leader is not None:
            engine._scheduler.preempt(leader)
            engine.check()
    assert engine._scheduler.num_preemptions == 2
    assert results(collected, "beams 2") == undisturbed["beams 2"]


@pytest.mark.parametrize("prompt_length", [31, 32, 33, 48])
def test_a_search_begins_with_a_cached_prompt_and_is_pushed_out(
    prompt_length: int, make_engine: Maker
) -> None:
    """Also where the cached spans are all that its beams have in common."""
    item = beam_request("a", random_prompt(prompt_length, seed=6), 20, num_beams=4, num_return_sequences=4)
    want = results(run_all(make_engine(VARIANT, span_size=16), [item]), "a")
    engine = make_engine(VARIANT, span_size=16, enable_prefix_cache=True, prefix_cache_ttl_s=60.0)
    run_all(engine, [request("warm", random_prompt(prompt_length, seed=6), 2)])
    engine.submit(item)
    collected = Collected()
    for step in range(100):
        if not engine.has_work():
            break
        collected.add(engine.step())
        leader = engine._scheduler.get("a")
        if step in (1, 5, 9) and leader is not None:
            engine._scheduler.preempt(leader)
        engine.check()
    assert engine._scheduler.num_preemptions == 3
    assert results(collected, "a") == want
    assert engine.stat().prefix_cache_hit_token > 0


def test_beams_that_share_too_much_to_come_back_start_over(
    make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that holds them while they share a history, but not each computed by itself."""
    item = beam_request("a", random_prompt(20, seed=1), 60, num_beams=8, num_return_sequences=8)
    wide = make_engine(VARIANT, span_size=16)
    schedule, most = wide._scheduler.schedule, [0]

    def measured() -> Any:
        plan = schedule()
        most[0] = max(most[0], wide._scheduler.ledger.used)
        return plan

    monkeypatch.setattr(wide._scheduler, "schedule", measured)
    collected = run_all(wide, [item])
    span_bytes = 2 * wide.facts.num_layers * wide.facts.span_bytes
    narrow = make_engine(VARIANT, span_size=16, kv_bytes=most[0] * span_bytes)
    restarts: list[int] = []
    start_over = Gang.start_over
    monkeypatch.setattr(
        Gang, "start_over", lambda gang: (restarts.append(gang.leader.length), start_over(gang))
    )
    narrow.submit(item)
    again = Collected()
    for step in range(300):
        if not narrow.has_work():
            break
        again.add(narrow.step())
        leader = narrow._scheduler.get("a")
        if step in (15, 33) and leader is not None:
            narrow._scheduler.preempt(leader)
            narrow.check()
    assert restarts, most
    assert results(again, "a") == results(collected, "a")


def test_equal_candidates_are_ranked_by_id_whatever_the_neighbours_want(make_sequence: Any) -> None:
    rng = np.random.default_rng(12)
    for trial in range(20):
        logits = rng.integers(0, 4, (5, 40)).astype(np.float32)  # many equal values
        counts = rng.integers(2, 9, 5).tolist()
        sequences = [make_sequence(3, num_beams=count) for count in counts]
        found = beam_candidates(torch.from_numpy(logits), sequences)
        for row, got, count in zip(logits, found, counts, strict=True):
            assert got is not None
            want = np.lexsort((np.arange(40), -row))[: 2 * count]
            assert got.tokens.tolist() == want.tolist(), f"trial {trial}"
            log_probs = row[want] - np.log(np.exp(row.astype(np.float64)).sum())
            np.testing.assert_allclose(got.log_probs, log_probs, rtol=1e-5)


def test_a_row_without_numbers_has_no_candidates(make_sequence: Any) -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(3))
    logits[1, 7] = float("nan")
    first, second = beam_candidates(logits, [make_sequence(3, num_beams=2) for _ in range(2)])
    assert first is not None and len(first.tokens) == 4 and second is None


def test_beams_share_the_spans_of_their_prompt(make_engine: Maker) -> None:
    engine = make_engine(VARIANT, span_size=16)
    engine.submit(beam_request("a", random_prompt(320), 30, num_beams=8))
    collected, most = Collected(), 0
    while engine.has_work():
        collected.add(engine.step())
        most = max(most, engine._scheduler.ledger.used)
        engine.check()
    assert 20 <= most <= 20 + 8 * 3, most
    assert engine._scheduler.ledger.used == 0


@pytest.mark.parametrize("moment", [1, 4, 12])
def test_a_cancelled_search_frees_everything(moment: int, make_engine: Maker) -> None:
    engine = make_engine(VARIANT, prefill_chunk=16)
    engine.submit(beam_request("a", random_prompt(40), 30, num_beams=4))
    for _ in range(moment):
        assert engine.step() == []
    engine.cancel("a")
    (last,) = engine.step()
    assert (last.tokens, last.position, str(last.finish), dict(last.tensors)) == ([], 0, "stopped", {})
    engine.check()
    assert engine.stat().used_span == 0 and not engine.has_work()


def test_a_search_that_outgrows_the_pool_ends_alone(make_engine: Maker) -> None:
    engine = make_engine(VARIANT, span_size=16)
    span_bytes = 2 * engine.facts.num_layers * engine.facts.span_bytes
    narrow = make_engine(VARIANT, span_size=16, kv_bytes=6 * span_bytes)
    got = run_all(
        narrow, [beam_request("wide", random_prompt(40), 40, num_beams=8), request("a", random_prompt(9), 4)]
    )
    assert got.finish("wide") == "cache_memory" and not got.tokens["wide"]
    assert got.finish("a") == "length" and len(got.tokens["a"]) == 4


def test_impossible_searches_are_refused(make_engine: Maker) -> None:
    engine = make_engine(VARIANT, max_batch=4)
    with pytest.raises(ValueError, match="at most the batch size 4"):
        engine.submit(beam_request("a", [5], 4, num_beams=5))
    with pytest.raises(ValueError, match="at least num_return_sequences 3"):
        engine.submit(beam_request("a", [5], 4, num_beams=2, num_return_sequences=3))
