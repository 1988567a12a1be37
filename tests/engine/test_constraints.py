"""Bans and finish checks against rescans of the whole history, written straight from spec 2.5.3 and 2.5.6."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from allspark_workers.engine.constraints import NgramTable
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.types import FinishReason
from hypothesis import given, settings
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
WORDS = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4)
Maker = Callable[..., Sequence]


def rescan_ngrams(ids: list[int], size: int) -> set[int]:
    last = ids[len(ids) - size + 1 :]
    starts = range(len(ids) - size + 1)
    return {ids[i + size - 1] for i in starts if size == 1 or ids[i : i + size - 1] == last}


def rescan_bad_words(ids: list[int], words: list[list[int]]) -> set[int]:
    return {w[-1] for w in words if w and len(ids) >= len(w) - 1 and ids[len(ids) - len(w) + 1 :] == w[:-1]}


def stops(ids: list[int], words: list[list[int]]) -> bool:
    return any(w and len(ids) > len(w) and ids[-len(w) :] == w for w in words)


def as_words(words: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(word) for word in words)


@settings(max_examples=150, deadline=None)
@given(prompt=TOKENS, more=TOKENS, size=st.integers(1, 4))
def test_ngram_bans_equal_a_rescan_at_every_length(prompt: list[int], more: list[int], size: int) -> None:
    seq = _sequence(prompt, no_repeat_ngram_size=size)
    ids = list(prompt)
    for token in more:
        assert seq.constraints.banned(seq) == rescan_ngrams(ids, size)
        seq.append(token)
        ids.append(token)


@settings(max_examples=150, deadline=None)
@given(prompt=TOKENS, more=TOKENS, words=WORDS, min_length=st.integers(0, 40))
def test_bad_words_and_min_length(
    prompt: list[int], more: list[int], words: list[list[int]], min_length: int
) -> None:
    seq = _sequence(prompt, bad_words=as_words(words), min_length=min_length, eos_token_id=7)
    ids = list(prompt)
    for token in more:
        expected = rescan_bad_words(ids, words) | ({7} if len(ids) < min_length else set())
        assert seq.constraints.banned(seq) == expected
        seq.append(token)
        ids.append(token)


@settings(max_examples=200, deadline=None)
@given(prompt=TOKENS, more=TOKENS, words=WORDS)
def test_stop_words_end_on_a_generated_token_and_may_reach_into_the_prompt(
    prompt: list[int], more: list[int], words: list[list[int]]
) -> None:
    seq = _sequence(prompt, stop_words=as_words(words))
    ids = list(prompt)
    for token in more:
        seq.append(token)
        ids.append(token)
        expected = FinishReason.STOP_WORDS if stops(ids, words) else None
        assert seq.constraints.finish(seq) == expected


def test_finish_order_is_length_then_eos_then_stop_words(make_sequence: Maker) -> None:
    settings_ = {"eos_token_id": 9, "early_stopping": True, "stop_words": ((9,),)}
    for max_length, expected in ((4, FinishReason.LENGTH), (5, FinishReason.EOS)):
        seq = make_sequence([1, 2, 3], max_length=max_length, **settings_)
        seq.append(9)
        assert seq.constraints.finish(seq) is expected
    seq = make_sequence([1, 2, 3], max_length=5, **(settings_ | {"early_stopping": False}))
    seq.append(9)
    assert seq.constraints.finish(seq) is FinishReason.STOP_WORDS


def test_without_early_stopping_eos_is_an_ordinary_token(make_sequence: Maker) -> None:
    seq = make_sequence([1, 2], max_length=9, eos_token_id=5)
    seq.append(5)
    assert seq.constraints.finish(seq) is None


def test_a_sequence_without_bans_does_no_work(make_sequence: Maker) -> None:
    assert not make_sequence(3, min_length=99).constraints.may_ban  # no eos: nothing to forbid
    assert make_sequence(3, min_length=99, eos_token_id=0).constraints.may_ban


def test_an_ngram_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        NgramTable(0)


def test_tokens_survive_growth_of_the_buffer(make_sequence: Maker) -> None:
    seq = make_sequence([5, 6], generated=[7])
    assert (seq.num_prompt, seq.num_generated, seq.num_remaining) == (2, 1, 3)
    for token in range(300):
        seq.append(token)
    assert seq.tokens[:5].tolist() == [5, 6, 7, 0, 1]
    assert seq.tail(3) == (297, 298, 299)
    assert seq.tail(1000) == (5, 6, 7, *range(300))


def _sequence(prompt: list[int], **params: object) -> Sequence:
    return _maker()(prompt, **params)


def _maker() -> Maker:
    import numpy as np
    from allspark_workers.engine.types import EngineRequest, GenerationParams

    def make(prompt: list[int], **params: object) -> Sequence:
        generation = GenerationParams(max_length=1000, **params)  # type: ignore[arg-type]
        return Sequence(EngineRequest("r", 1, np.asarray(prompt, np.int64), generation), 0)

    return make
