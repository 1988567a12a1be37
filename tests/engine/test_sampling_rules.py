"""Generation fields against a plain reference that applies spec 2.5.2-2.5.4 to transformers' logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from allspark_workers.engine.engine import Engine
from engine_helpers import VOCAB, TinyModels, random_prompt, request, run_all

Maker = Callable[..., Engine]
VARIANT = "llama-tied"
NEW = 24
PENALISED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition-below-one": {"repetition_penalty": 0.8},
    "repetition-in-generation": {"repetition_penalty": 1.7, "suppress_repetition": True},
    "presence": {"presence_penalty": 1.5},
    "presence-negative": {"presence_penalty": -1.0},
    "both": {"repetition_penalty": 1.3, "presence_penalty": 0.7},
    "unigram": {"no_repeat_ngram_size": 1},
    "bigram": {"no_repeat_ngram_size": 2},
    "trigram": {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
}


def processed(logits: np.ndarray, ids: list[int], num_prompt: int, p: dict[str, Any]) -> np.ndarray:
    """Steps 1 to 5 of spec 2.5.2 on one row."""
    x = logits.astype(np.float64).copy()
    penalty, presence = p.get("repetition_penalty", 1.0), p.get("presence_penalty", 0.0)
    for token in set(ids[num_prompt:] if p.get("suppress_repetition") else ids):
        x[token] = x[token] * penalty if x[token] < 0 else x[token] / penalty
    for token in set(ids[num_prompt:]):
        x[token] -= presence
    size = p.get("no_repeat_ngram_size", 0)
    if size:
        for i in range(len(ids) - size + 1):
            if ids[i : i + size - 1] == ids[len(ids) - size + 1 :]:
                x[ids[i + size - 1]] = -1e9
    if len(ids) < p.get("min_length", 0):
        x[p["eos_token_id"]] = -1e9
    for word in p.get("bad_words", ()):
        if len(ids) >= len(word) - 1 and tuple(ids[len(ids) - len(word) + 1 :]) == tuple(word[:-1]):
            x[word[-1]] = -1e9
    return x


@torch.inference_mode()
def last_logits(model: Any, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids])).logits[0, -1].numpy()


def reference_greedy(model: Any, prompt: list[int], p: dict[str, Any], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(processed(last_logits(model, ids), ids, len(prompt), p).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", list(PENALISED))
def test_penalised_greedy_tokens(name: str, tiny: TinyModels, make_engine: Maker) -> None:
    p, prompt = PENALISED[name], random_prompt(30, seed=3)
    want = reference_greedy(tiny.reference(VARIANT), prompt, p, NEW)
    got = run_all(make_engine(VARIANT), [request("a", prompt, NEW, **p)])
    assert got.tokens["a"] == want
    assert want != reference_greedy(tiny.reference(VARIANT), prompt, {}, NEW), (
        "the setting has no effect here"
    )


def test_a_batch_of_all_penalties_at_once(tiny: TinyModels, make_engine: Maker) -> None:
    """Rows with and without penalties share a step; each slot's bitmask belongs to one request."""
    model, requests, want = tiny.reference(VARIANT), [], {}
    for index, (name, p) in enumerate(({"plain": {}} | PENALISED).items()):
        prompt = random_prompt(12 + index, seed=index)
        requests.append(request(name, prompt, 10, **p))
        want[name] = reference_greedy(model, prompt, p, 10)
    engine = make_engine(VARIANT, max_batch=4)  # slots are used again
    assert run_all(engine, requests).tokens == want


def test_bad_words_are_never_completed(tiny: TinyModels, make_engine: Maker) -> None:
    model, prompt = tiny.reference(VARIANT), random_prompt(9)
    free = reference_greedy(model, prompt, {}, NEW)
    p = {"bad_words": ((free[0],), (prompt[-1], free[1]), tuple(free[2:4]), ())}
    want = reference_greedy(model, prompt, {"bad_words": [w for w in p["bad_words"] if w]}, NEW)
    got = run_all(make_engine(VARIANT), [request("a", prompt, NEW, **p)]).tokens["a"]
    assert got == want != free
    assert free[0] not in got


def test_min_length_forbids_eos_until_then(tiny: TinyModels, make_engine: Maker) -> None:
    model, prompt = tiny.reference(VARIANT), random_prompt(9)
    eos = reference_greedy(model, prompt, {}, 1)[0]
    p = {"eos_token_id": eos, "early_stopping": True}
    engine = make_engine(VARIANT)
    at_once = run_all(engine, [request("a", prompt, NEW, **p)])
    assert at_once.tokens["a"] == [eos] and at_once.finish("a") == "eos"
    bound = len(prompt) + 6
    later = run_all(engine, [request("b", prompt, NEW, min_length=bound, **p)])
    assert eos not in later.tokens["b"][:6]
    want = reference_greedy(model, prompt, {"min_length": bound, "eos_token_id": eos}, NEW)
    end = want.index(eos) + 1 if eos in want else NEW
    assert later.tokens["b"] == want[:end]


def test_stop_words_may_reach_into_the_prompt(tiny: TinyModels, make_engine: Maker) -> None:
    model, prompt = tiny.reference(VARIANT), random_prompt(9)
    free = reference_greedy(model, prompt, {}, NEW)
    engine = make_engine(VARIANT)
    cases = {
        "spanning": ((*prompt[-2:], free[0]), 1),
        "inside": (tuple(free[3:6]), 6),
        "prompt-only": (tuple(prompt[-3:]), NEW),
    }
    for name, (word, length) in cases.items():
        got = run_all(engine, [request(name, prompt, NEW, stop_words=((), word))])
        assert got.tokens[name] == free[:length], name
        assert got.finish(name) == ("length" if length == NEW else "stop_words")


def test_eos_and_length(tiny: TinyModels, make_engine: Maker) -> None:
    model, prompt = tiny.reference(VARIANT), random_prompt(9)
    free = reference_greedy(model, prompt, {}, NEW)
    engine = make_engine(VARIANT)
    eos = free[4]
    first = free.index(eos) + 1
    stopped = run_all(engine, [request("a", prompt, NEW, eos_token_id=eos, early_stopping=True)])
    assert stopped.tokens["a"] == free[:first] and stopped.finish("a") == "eos"
    through = run_all(engine, [request("b", prompt, NEW, eos_token_id=eos)])
    assert through.tokens["b"] == free and through.finish("b") == "length"
    one = run_all(engine, [request("c", prompt, 1)])
    assert one.tokens["c"] == free[:1] and one.finish("c") == "length"


@pytest.mark.parametrize("p", [{"top_k": 4}, {"top_p": 0.6}, {"top_k": 12, "top_p": 0.7, "temperature": 1.5}])
def test_drawn_tokens_lie_in_the_kept_set(p: dict[str, Any], tiny: TinyModels, make_engine: Maker) -> None:
    model, prompt = tiny.reference(VARIANT), random_prompt(20)
    requests = [request(f"s{seed}", prompt, 6, do_sample=True, seed=seed, **p) for seed in range(12)]
    got = run_all(make_engine(VARIANT), requests).tokens
    drawn = set()
    for tokens in got.values():
        ids = list(prompt)
        for token in tokens:
            assert token in kept(last_logits(model, ids).astype(np.float64), p)
            ids.append(token)
        drawn.add(tokens[0])
    assert len(drawn) > 1, "twelve seeds and always the same token"


def kept(x: np.ndarray, p: dict[str, Any]) -> set[int]:
    """Ids left by top-k and top-p; a margin of 1e-4 stands for rounding."""
    order = np.argsort(-x, kind="stable")[: p.get("top_k") or VOCAB]
    q = np.exp((x[order] - x[order[0]]) / p.get("temperature", 1.0))
    q /= q.sum()
    top_p = p.get("top_p", 0.0)
    if not 0 < top_p < 1:
        return set(order.tolist())
    return set(order[np.cumsum(q) - q <= top_p + 1e-4].tolist())


def test_temperature_zero_and_top_k_one_are_greedy(tiny: TinyModels, make_engine: Maker) -> None:
    prompt = random_prompt(20)
    want = reference_greedy(tiny.reference(VARIANT), prompt, {}, NEW)
    requests = [
        request("zero", prompt, NEW, do_sample=True, temperature=0.0, seed=3),
        request("one", prompt, NEW, do_sample=True, top_k=1, seed=3),
        request("off", prompt, NEW, do_sample=False, temperature=5.0, seed=3),
    ]
    got = run_all(make_engine(VARIANT), requests).tokens
    assert got == {"zero": want, "one": want, "off": want}
