"""The prefix cache under any order of what requests, time and short memory can do to it, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from allspark_bus import prefix_keys
from allspark_bus.prefix_keys import PrefixSalt
from allspark_workers.engine import prefix_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray
from prefix_helpers import SPAN, Bench

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5).flatmap(
    lambda blocks: st.integers(1, SPAN).map(
        lambda rest: [b for b in blocks for _ in range(SPAN)] + [7] * rest
    )
)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, compute and end at any stage, time passes, memory is short: contents stay right."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(spans=11, slots=3, ttl_s=10.0)

    @rule(prompt=PROMPTS, generated=st.integers(0, 5))
    def start(self, prompt: list[int], generated: int) -> None:
        self.bench.start(prompt, [9] * generated)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        seq = data.draw(st.sampled_from(self.bench.running))
        if seq.num_remaining:
            self.bench.compute(seq, count)

    @precondition(lambda self: self.bench.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.bench.end(data.draw(st.sampled_from(self.bench.running)))

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.bench.clock.now_s += seconds

    @rule(count=st.integers(1, 11))
    def press(self, count: int) -> None:
        spans = self.bench.ledger.allocate("pressure", count)
        for span in spans or ():
            self.bench.memory.spans[span] = None
        self.bench.ledger.release("pressure")

    @invariant()
    def balances(self) -> None:
        self.bench.check()
        for seq in self.bench.running:
            self.bench.verify(seq)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class CollidingMachine(CacheMachine):
    """The same with keys of one bit per span."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: Callable[..., Iterator[bytes]] = prefix_keys.span_keys
        prefix_cache.span_keys = self._weak  # type: ignore[assignment]

    def _weak(self, salt: PrefixSalt, tokens: NDArray[np.int64]) -> Iterator[bytes]:
        for key in self._keys(salt, tokens):
            yield bytes([key[0] & 1])

    def teardown(self) -> None:
        prefix_cache.span_keys = prefix_keys.span_keys


TestCollidingMachine = CollidingMachine.TestCase
TestCollidingMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
