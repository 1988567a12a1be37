"""R5: a request's tokens depend on its own logits, seed and positions, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import EngineRequest
from engine_helpers import Collected, random_prompt, request, run_all

Maker = Callable[..., Engine]
NEW = 40
SAMPLED = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "seed": 20240229,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "no_repeat_ngram_size": 3,
}


def target() -> EngineRequest:
    return request("target", random_prompt(45), NEW, **SAMPLED)


def neighbours(count: int) -> list[EngineRequest]:
    """Requests of other lengths, settings and seeds; some end long before the target."""
    return [
        request(
            f"n{i}",
            random_prompt(3 + 5 * i, seed=i),
            4 + i,
            do_sample=i % 3 > 0,
            temperature=0.5 + i / 20,
            top_k=i,
            seed=i - 7,
            repetition_penalty=1.0 + (i % 2) / 10,
            suppress_repetition=i % 4 == 0,
        )
        for i in range(count)
    ]


@pytest.fixture
def quiet(make_engine: Maker) -> list[int]:
    """The target's tokens in an engine of its own."""
    return run_all(make_engine(), [target()]).tokens["target"]


def test_a_seed_decides_the_tokens(quiet: list[int], make_engine: Maker) -> None:
    assert len(quiet) == NEW and len(set(quiet)) > 10
    assert run_all(make_engine(), [target()]).tokens["target"] == quiet, "second engine"
    other = request("target", random_prompt(45), NEW, **(SAMPLED | {"seed": 1}))
    assert run_all(make_engine(), [other]).tokens["target"] != quiet


@pytest.mark.parametrize("place", [0, 15, 31])
def test_neighbours_do_not_matter(place: int, quiet: list[int], make_engine: Maker) -> None:
    requests = neighbours(31)
    requests.insert(place, target())
    assert run_all(make_engine(), requests).tokens["target"] == quiet


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunking_does_not_matter(chunk: int, quiet: list[int], make_engine: Maker) -> None:
    requests = [*neighbours(3), target()]
    assert run_all(make_engine(prefill_chunk=chunk), requests).tokens["target"] == quiet


def test_preemption_for_lack_of_memory_does_not_matter(make_engine: Maker) -> None:
    """A pool for two of the sixteen requests at full length: they push each other out."""
    requests = [
        request(f"r{i}", random_prompt(20 + i, seed=i), NEW, **(SAMPLED | {"seed": i})) for i in range(16)
    ]
    wide = make_engine(span_size=16)
    expected = run_all(wide, requests)
    span_bytes = 2 * wide.facts.num_layers * wide.facts.span_bytes
    narrow = make_engine(span_size=16, kv_bytes=9 * span_bytes)
    got = run_all(narrow, requests)
    assert narrow._scheduler.num_preemptions > 3
    assert narrow._scheduler.ledger.free == 9
    assert got.tokens == expected.tokens


def test_preemption_in_the_middle_does_not_matter(quiet: list[int], make_engine: Maker) -> None:
    engine = make_engine()
    collected = Collected()
    engine.submit(target())
    for step in range(200):
        if not engine.has_work():
            break
        collected.add(engine.step())
        sequence = engine._scheduler.get("target")
        if step in (0, 5, 6, 20) and sequence is not None:
            engine._scheduler.preempt(sequence)
    assert engine._scheduler.num_preemptions == 4
    assert collected.tokens["target"] == quiet


@pytest.mark.parametrize("done", [1, 17, NEW - 1])
def test_a_resumed_request_goes_on_with_the_same_tokens(
    done: int, quiet: list[int], make_engine: Maker
) -> None:
    resumed = request("target", random_prompt(45), NEW, epoch=2, generated=quiet[:done], **SAMPLED)
    engine = make_engine()
    engine.submit(resumed)
    first = engine.step()
    assert [(out.position, out.epoch) for out in first] == [(done, 2)]
    collected = Collected()
    collected.add(first)
    while engine.has_work():
        collected.add(engine.step())
    assert collected.tokens["target"] == quiet[done:]


def test_the_number_of_threads_does_not_matter(quiet: list[int], make_engine: Maker) -> None:
    assert run_all(make_engine(num_threads=2), [*neighbours(8), target()]).tokens["target"] == quiet


def test_half_precision_weights_keep_the_promise(make_engine: Maker) -> None:
    alone = run_all(make_engine("qwen2", dtype="bf16"), [target()]).tokens["target"]
    crowd = run_all(make_engine("qwen2", dtype="bf16", prefill_chunk=33), [*neighbours(12), target()])
    assert crowd.tokens["target"] == alone
