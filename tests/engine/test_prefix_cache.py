"""The prefix cache without a model: what is found was computed from the same tokens, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from allspark_bus.prefix_keys import PrefixSalt
from allspark_workers.engine import prefix_cache
from numpy.typing import NDArray
from prefix_helpers import SPAN, Bench


def test_the_longest_chain_of_full_spans_is_found_and_the_last_token_is_left() -> None:
    bench = Bench()
    prompt = list(range(10))
    assert bench.run(prompt) == 0
    assert bench.run(prompt) == 8
    assert bench.run(prompt[:8]) == 4, "the last token gives the logits"
    assert bench.run(prompt[:9]) == 8
    assert bench.run(prompt[:3]) == 0
    assert bench.run([*prompt[:4], 99, *prompt[5:]]) == 4
    assert bench.run([99, *prompt[1:]]) == 0
    assert bench.run(prompt[4:8] + prompt[4:8] + [1]) == 0, "the same span behind another chain"


def test_generated_tokens_are_neither_cached_nor_served() -> None:
    bench = Bench()
    seq = bench.start([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    assert seq is not None
    bench.compute(seq)
    bench.end(seq)
    assert len(bench.cache) == 1
    assert bench.run([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    resumed = bench.start([1, 2, 3, 4], [5, 6])
    assert resumed is not None and resumed.num_computed == 4, (
        "with a token behind it the whole prompt may come"
    )


def test_requests_that_run_at_once_share_what_is_computed() -> None:
    bench = Bench(spans=20)
    prompt = list(range(9))
    first = bench.start(prompt)
    second = bench.start(prompt)
    assert first is not None and second is not None and second.num_computed == 0
    bench.compute(first, 4)
    third = bench.start(prompt)
    assert third is not None and third.num_computed == 4
    bench.compute(first, 4)
    bench.compute(second, 1)  # takes over both spans of the first one, and computes the last token
    assert second.num_computed == 9 and second.count_cached() == 8
    assert second.spans[:2] == first.spans[:2] and third.spans[:1] == first.spans[:1]
    assert bench.ledger.used == 2 + 1 + 1 + 2
    for seq in (first, second, third):
        bench.end(seq)
        bench.check()
    assert bench.ledger.num_idle == 2


def test_the_same_span_computed_twice_is_kept_once() -> None:
    bench = Bench(spans=20)
    prompt = list(range(9))
    pair = [bench.start(prompt), bench.start(prompt)]
    for seq in pair:
        assert seq is not None
        bench.cache.skip(seq)
    for seq in pair:  # one step computes both before either is committed
        assert seq is not None
        for index in range(2):
            bench.memory.spans[seq.spans[index]] = tuple(prompt[: (index + 1) * SPAN])
        seq.num_computed = 9
    for seq in pair:
        assert seq is not None
        bench.cache.extend(seq)
        bench.verify(seq)
    assert len(bench.cache) == 2 and bench.ledger.used == 4
    for seq in pair:
        assert seq is not None
        bench.end(seq)
    bench.check()


def test_the_time_to_live_counts_from_the_last_use() -> None:
    bench = Bench(ttl_s=10.0)
    prompt = list(range(9))
    bench.run(prompt)
    bench.clock.now_s += 9.9
    assert bench.run(prompt) == 8
    bench.clock.now_s += 9.9
    assert bench.run(prompt[:5]) == 4
    bench.clock.now_s += 0.2  # the second span has not been used for 10.1 s, the first for 0.2 s
    assert bench.run(prompt) == 4
    long = bench.start(prompt)
    assert long is not None
    bench.clock.now_s += 1000.0
    assert bench.run(prompt) == 8, "what is in use does not expire"
    bench.end(long)
    assert bench.cache.next_expiry_s() == bench.clock.now_s + 10.0
    bench.clock.now_s += 10.0
    bench.cache.expire()
    assert (len(bench.cache), bench.ledger.num_idle, bench.cache.next_expiry_s()) == (0, 0, None)
    bench.check()


def test_without_a_time_to_live_only_live_requests_share() -> None:
    bench = Bench(ttl_s=0.0, slots=4)
    prompt = list(range(9))
    first = bench.start(prompt)
    assert first is not None
    bench.compute(first)
    second = bench.start(prompt)
    assert second is not None and second.num_computed == 8
    bench.end(first)
    assert bench.run(prompt) == 8, "the second one still uses it"
    bench.end(second)
    assert len(bench.cache) == 0 and bench.ledger.num_idle == 0
    assert bench.run(prompt) == 0
    assert bench.memory.num_saved == 0


def test_memory_pressure_evicts_the_least_recently_used_and_its_end_first() -> None:
    bench = Bench(spans=6)
    a, b = [1] * 9, [2] * 9
    bench.run(a)
    bench.run(b)
    bench.run(a)
    assert bench.ledger.num_idle == 4 and bench.ledger.free == 6, "idle spans count as free"
    big = bench.start([3] * 12)
    assert big is not None
    bench.end(big)
    assert len(bench.cache) == 3, "one span more than was free"
    assert bench.run(b) == 4
    assert bench.run(a) == 8


def test_spans_in_use_are_not_evicted() -> None:
    bench = Bench(spans=4)
    prompt = list(range(9))
    seq = bench.start(prompt)
    assert seq is not None
    bench.compute(seq)
    assert bench.start([7] * 8) is None
    assert bench.start([7] * 4) is not None
    bench.verify(seq)
    bench.check()


def test_what_is_evicted_comes_back_from_the_host() -> None:
    bench = Bench(spans=4, slots=5)
    a, b = list(range(13)), list(range(20, 33))
    bench.run(a)
    bench.run(b)
    assert (bench.cache.num_on_host, bench.memory.num_saved) == (3, 3)
    assert bench.run(a[:9]) == 8
    assert bench.memory.num_loaded == 2
    assert bench.run(a) == 12


def test_the_host_tier_keeps_the_most_recently_used() -> None:
    bench = Bench(spans=3, slots=2)
    for value in range(4):
        bench.run([value] * 9)
    assert bench.cache.num_on_host == 2
    assert bench.run([2] * 9) == 8 and bench.memory.num_loaded == 2
    assert bench.run([0] * 9) == 0


def test_the_host_tier_obeys_the_time_to_live() -> None:
    bench = Bench(spans=3, slots=4, ttl_s=10.0)
    bench.run([1] * 9)
    bench.run([2] * 9)
    bench.clock.now_s += 10.0
    bench.cache.expire()
    assert len(bench.cache) == bench.cache.num_on_host == 0
    assert bench.run([1] * 9) == 0
    bench.check()


def test_what_has_expired_is_not_worth_a_copy() -> None:
    bench = Bench(spans=3, slots=4, ttl_s=10.0)
    bench.run([1] * 9)
    bench.clock.now_s += 10.0
    assert bench.ledger.allocate("other", 3) is not None
    assert bench.memory.num_saved == 0 and len(bench.cache) == 0


@pytest.fixture
def weak_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of one depth collide."""

    def span_keys(salt: PrefixSalt, tokens: NDArray[np.int64]) -> Iterator[bytes]:
        for index in range(len(tokens) // salt.span_size):
            yield bytes([index])

    monkeypatch.setattr(prefix_cache, "span_keys", span_keys)


def test_a_collision_of_keys_is_caught_by_the_tokens(weak_keys: None) -> None:
    bench = Bench()
    a, b = list(range(13)), list(range(4)) + list(range(104, 113))
    assert bench.run(a) == 0
    assert bench.run(b) == 4, "the first span is the same, the second one only has the same key"
    assert bench.run([9] * 13) == 0
    assert bench.run(a) == 12
    assert len(bench.cache) == 3


def test_a_collision_behind_another_chain_is_caught(weak_keys: None) -> None:
    """Same key and same tokens in the second span, but what comes before it differs."""
    bench = Bench(spans=4)
    assert bench.run([1, 1, 1, 1, 5, 5, 5, 5, 0]) == 0
    seq = bench.start([2] * 13)  # pushes one span out: the end of the chain
    assert seq is not None
    bench.end(seq)
    assert bench.run([2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0


@pytest.mark.parametrize(
    "salt",
    [
        PrefixSalt("other", SPAN),
        PrefixSalt("model", SPAN, adapter="a"),
        PrefixSalt("model", SPAN, cache_mode=1),
        PrefixSalt("model", SPAN, embeddings="1f"),
    ],
)
def test_another_salt_finds_nothing(salt: PrefixSalt, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    prompt = list(range(9))
    bench.run(prompt)
    with monkeypatch.context() as patch:
        patch.setattr(bench.cache, "_salt_of", lambda seq: salt)
        assert bench.run(prompt) == 0
    assert bench.run(prompt) == 8


def test_clearing_leaves_running_requests_alone() -> None:
    bench = Bench(slots=2)
    prompt = list(range(17))
    seq = bench.start(prompt)
    assert seq is not None
    bench.compute(seq, 8)
    bench.cache.clear()
    bench.check()
    bench.compute(seq)
    bench.end(seq)
    bench.check()
    assert bench.run(prompt) == 0 and bench.run(prompt) == 16
