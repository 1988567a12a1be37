"""Captured decode steps: native calls recorded on a CPU, a graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from allspark_workers.engine import promises
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import ModelMemoryError
from allspark_workers.engine.graphs import buckets
from allspark_workers.engine.runner import Runner
from allspark_workers.engine.types import EngineRequest
from engine_helpers import random_prompt, request, run_all

Maker = Callable[..., Engine]


@pytest.mark.parametrize("max_batch", [1, 3, 8, 32, 100, 256])
def test_buckets_rise_to_the_batch_limit(max_batch: int) -> None:
    sizes = buckets(max_batch)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_batch
    assert all(later <= 2 * size for size, later in pairwise(sizes))
    assert buckets(max_batch, is_padding_free=True) == [max_batch]


def requests() -> list[EngineRequest]:
    """Batches of every size from 1 to 11, greedy and sampled, over several spans."""
    return [
        request(f"r{i}", random_prompt(1 + 9 * i, seed=i), 5 + 7 * i, do_sample=i % 2 > 0, seed=i)
        for i in range(11)
    ]


def test_captured_steps_do_not_change_the_tokens(make_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_engine("qwen3", max_batch=11)
    plain._runner._graphs = None
    fixed = make_engine("qwen3", max_batch=11)
    assert fixed._runner._graphs is not None, "no native kernels: nothing to compare"
    forward = fixed._runner._forward
    lengths: list[int] = []

    def count(ops: object, batch: object, is_profiled: bool) -> torch.Tensor:
        lengths.append(batch.tokens.shape[1] - len(batch.q_lens))
        return forward(ops, batch, is_profiled)

    monkeypatch.setattr(fixed._runner, "_forward", count)
    assert run_all(fixed, requests()).tokens == run_all(plain, requests()).tokens
    assert lengths and max(lengths) > 0 and len(lengths) < 5, "decode steps took the other path"


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (torch.OutOfMemoryError, ModelMemoryError, r"no room for a step beside .* a smaller batch"),
        (RuntimeError, RuntimeError, "out of resources"),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(
    raised: type[Exception],
    expected: type[Exception],
    text: str,
    make_engine: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("qwen3", max_batch=4)
    tokens = run_all(engine, requests()).tokens
    engine.stop()

    def refuse(runner: Runner, max_length: int) -> None:
        raise raised("out of resources")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "capture", refuse)
        with pytest.raises(expected, match=text):
            engine.start()
    kept = promises._promises[engine._residence]
    assert kept.outstanding() == kept.nbytes > 0, "its KV memory stays promised to it"
    with pytest.raises(ValueError, match="not started"):
        engine.submit(requests()[0])
    engine.start()
    assert run_all(engine, requests()).tokens == tokens
