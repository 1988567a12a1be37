"""Several samples of one prompt: equal to single requests, sharing its KV, on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.families import sequence_seed
from allspark_workers.engine.sequence import NO_ROW
from allspark_workers.engine.types import EngineRequest, FinishReason, StepOutput
from engine_helpers import Collected, random_prompt, request, run_all

Maker = Callable[..., Engine]
COUNT, NEW = 5, 24
SETTINGS = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 991}
PROMPT = random_prompt(75, seed=8)


def several(name: str = "several", **changes: Any) -> EngineRequest:
    return request(name, PROMPT, NEW, **(SETTINGS | {"num_return_sequences": COUNT} | changes))


def singles(**changes: Any) -> list[EngineRequest]:
    """The requests whose tokens the sequences must equal."""
    return [
        request(f"s{i}", PROMPT, NEW, **(SETTINGS | changes | {"seed": sequence_seed(991, i)}))
        for i in range(COUNT)
    ]


def sequences(collected: Collected, key: str = "several") -> list[list[int]]:
    tensors = collected.ends[key].tensors
    assert sorted(tensors) == [f"sequence_{i}" for i in range(1, len(tensors) + 1)]
    assert all(value.dtype == np.int64 and value.ndim == 1 for value in tensors.values())
    return [
        collected.tokens[key],
        *[tensors[f"sequence_{i}"].tolist() for i in range(1, len(tensors) + 1)],
    ]


@pytest.fixture
def expected(make_engine: Maker) -> list[list[int]]:
    got = run_all(make_engine(span_size=16), singles())
    found = [got.tokens[f"s{i}"] for i in range(COUNT)]
    assert len({tuple(tokens) for tokens in found}) == COUNT
    return found


@pytest.mark.parametrize("size", [{"max_batch": 32}, {"max_batch": 2}, {"prefill_chunk": 7}])
def test_each_sequence_equals_a_request_of_its_own(
    size: dict[str, int], expected: list[list[int]], make_engine: Maker
) -> None:
    """Also where fewer fit into the batch than there are, so that some start when the first have ended."""
    engine = make_engine(span_size=16, **size)
    got = run_all(engine, [request("x", random_prompt(20), 30), several(), request("y", PROMPT, 9)])
    assert sequences(got) == expected
    assert engine.stat().used_span == 0 and got.finish("several") == "length"


def test_seed_top_k_and_top_p_may_differ(make_engine: Maker) -> None:
    arrays = {"seeds": (5, -6, 7), "top_ks": (0, 3, 50), "top_ps": (0.5, 0.9, 0.0)}
    engine = make_engine()
    got = run_all(engine, [several(num_return_sequences=3, **arrays)])
    alone = run_all(
        engine,
        [
            request(f"s{i}", PROMPT, NEW, **(SETTINGS | {"seed": seed, "top_k": top_k, "top_p": top_p}))
            for i, (seed, top_k, top_p) in enumerate(zip(*arrays.values(), strict=True))
        ],
    )
    assert sequences(got) == [alone.tokens[f"s{i}"] for i in range(3)]


def test_penalties_and_different_lengths(make_engine: Maker) -> None:
    """Sequences that end at different times, by eos or at the limit, each with its own token history."""
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "no_repeat_ngram_size": 2}
    engine = make_engine()
    free = run_all(engine, singles(**settings))
    eos = {"eos_token_id": free.tokens["s2"][6], "early_stopping": True}
    alone = run_all(engine, singles(**settings, **eos))
    want = [alone.tokens[f"s{i}"] for i in range(COUNT)]
    assert len({len(tokens) for tokens in want}) > 1
    got = run_all(engine, [several(**settings, **eos)])
    assert sequences(got) == want
    assert got.finish("several") == alone.finish("s0")


def test_the_prompt_is_computed_and_stored_once(make_engine: Maker) -> None:
    engine = make_engine(span_size=16, prefill_chunk=32)
    engine.submit(request("several", random_prompt(330), 10, **(SETTINGS | {"num_return_sequences": 8})))
    most = 0
    while engine.has_work():
        engine.step()
        most = max(most, engine._scheduler.ledger.used)
        engine.check()
    # 20 full spans of the prompt; then each sequence has the rest of the prompt and its own tokens.
    assert most == 20 + 8 * 2
    assert engine.stat().total_prefill_token == 330
    assert engine.stat().total_generated_token == 80


def test_lack_of_memory_does_not_matter(expected: list[list[int]], make_engine: Maker) -> None:
    """A pool in which not even two full sequences fit beside each other without sharing."""
    wide = make_engine(span_size=16)
    span_bytes = 2 * wide.facts.num_layers * wide.facts.span_bytes
    narrow = make_engine(span_size=16, kv_bytes=9 * span_bytes)
    got = run_all(narrow, [several(), several("again")])
    assert narrow._scheduler.num_preemptions > 0
    assert sequences(got) == sequences(got, "again") == expected


def test_a_sequence_may_begin_with_what_another_one_gets_in_the_same_step(make_engine: Maker) -> None:
    """The partly filled span of the prompt is copied to both from the sequence that runs."""
    prompt = random_prompt(44, seed=2)
    options = SETTINGS | {"num_return_sequences": 3}
    engine = make_engine(span_size=16, max_batch=3)
    want = sequences(run_all(engine, [request("several", prompt, NEW, **options)]))
    engine.submit(request("other", random_prompt(5), 200, priority=1))
    engine.submit(request("several", prompt, NEW, **options))
    collected = Collected()
    for _ in range(8):
        collected.add(engine.step())
    first, second, third = engine._families["several"].queued
    assert first.row != NO_ROW != second.row and third.row == NO_ROW
    engine._scheduler.preempt(first)
    engine.cancel("other")
    while engine.has_work():
        collected.add(engine.step())
    assert sequences(collected) == want


@pytest.mark.parametrize("done", [1, 13, NEW])
def test_a_resumed_request_publishes_only_what_is_missing(
    done: int, expected: list[list[int]], make_engine: Maker
) -> None:
    engine = make_engine(span_size=16)
    engine.submit(several(generated=expected[0][:done], epoch=2))
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs += engine.step()
    positions = [out.position for out in outputs for _ in out.tokens]
    assert positions == list(range(done, NEW))
    assert [token for out in outputs for token in out.tokens] == expected[0][done:]
    last = outputs[-1]
    assert last.finish is FinishReason.LENGTH and last.position + len(last.tokens) == NEW
    assert [last.tensors[f"sequence_{i}"].tolist() for i in range(1, COUNT)] == expected[1:]


@pytest.mark.parametrize("verb", ["cancel", "deadline"])
@pytest.mark.parametrize("moment", [1, 3, 12])
def test_an_end_from_outside_ends_all_sequences(verb: str, moment: int, make_engine: Maker) -> None:
    now_s = [100.0]
    engine = make_engine(prefill_chunk=40, max_batch=3, clock=lambda: now_s[0])
    engine.submit(several(deadline_s=200.0))
    collected = Collected()
    for _ in range(moment):
        collected.add(engine.step())
    if verb == "cancel":
        engine.cancel("several")
    else:
        now_s[0] = 200.5
    outputs = engine.step()
    collected.add(outputs)
    assert [str(out.finish) for out in outputs] == ["stopped" if verb == "cancel" else "deadline"]
    lengths = [len(tokens) for tokens in sequences(collected)]
    assert lengths == ([0] * 5 if moment == 1 else [2, 1, 1, 0, 0] if moment == 3 else lengths)
    engine.check()
    assert engine.stat().used_span == 0 and not engine.has_work()


def test_holding_pauses_all_sequences(expected: list[list[int]], make_engine: Maker) -> None:
    engine = make_engine()
    engine.submit(several())
    collected = Collected()
    for _ in range(6):
        collected.add(engine.step())
    engine.hold("several")
    for _ in range(3):
        assert engine.step() == []
    assert not engine.has_work()
    engine.resume("several")
    while engine.has_work():
        collected.add(engine.step())
    assert sequences(collected) == expected


def test_a_newer_attempt_replaces_all_sequences_of_the_older(
    expected: list[list[int]], make_engine: Maker
) -> None:
    engine = make_engine()
    engine.submit(several())
    for _ in range(6):
        engine.step()
    engine.submit(several(epoch=2, generated=expected[0][:3]))
    outputs = engine.step()
    assert (outputs[0].epoch, outputs[0].finish) == (1, FinishReason.STOPPED)
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].epoch == 2 and outputs[-1].tensors["sequence_4"].tolist() == expected[4]


def test_one_failing_sequence_fails_its_request_alone(
    make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    sampler = engine._runner._sampler  # type: ignore[union-attr]
    original = sampler.sample

    def sample(ops: Any, logits: Any, rows: list[Any], masks: Any) -> list[int]:
        if any(row.request_id == "#2 of several" and row.num_generated == 4 for row in rows):
            raise RuntimeError("this sequence cannot be drawn")
        return original(ops, logits, rows, masks)

    monkeypatch.setattr(sampler, "sample", sample)
    got = run_all(engine, [several(), request("other", PROMPT, 9)])
    assert got.finish("several") == "error" and "cannot be drawn" in got.ends["several"].message
    assert got.finish("other") == "length" and len(got.tokens["other"]) == 9


def test_derived_seeds_are_distinct_and_fixed() -> None:
    """The values are part of the contract: a resumed request derives them again on another worker."""
    # Published outputs of SplitMix64 from state 1234567.
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [sequence_seed(1234567, i) % 2**64 for i in range(5)] == [1234567, *outputs]
    assert all(-(2**63) <= sequence_seed(s, i) < 2**63 for s in (-1, 2**63 - 1, -(2**63)) for i in range(9))
