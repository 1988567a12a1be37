"""Token bans and finish checks that need the token history; host side, incremental, without torch.

Order and formulas: spec 2.5.3 (no-repeat n-gram, min_length, bad words) and 2.5.6 (finish checks).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from allspark_workers.engine.types import FinishReason, GenerationParams


class TokenHistory(Protocol):
    """What the checks read of a request: `length` tokens, the last `count` of them as integers."""

    length: int

    def tail(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens, or all of them if there are fewer."""


class SuffixTable:
    """Arrays of tokens, grouped by length: one look-up per distinct length finds a matching suffix."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        groups: dict[int, set[tuple[int, ...]]] = {}
        for word in words:
            if word:  # an empty array would match everything and is ignored (spec 2.5.6)
                groups.setdefault(len(word), set()).add(tuple(word))
        self.groups = sorted(groups.items())
        self.longest = self.groups[-1][0] if self.groups else 0

    def ends(self, history: TokenHistory) -> bool:
        """Whether the history ends with one of the arrays and is longer than it."""
        tail = history.tail(self.longest)
        size = len(tail)
        return any(
            length < history.length and length <= size and tail[size - length :] in words
            for length, words in self.groups
        )


class BadWordTable:
    """For each bad word: its last token is banned once the tokens before it are the end of the history."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        groups: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for word in words:
            if word:
                groups.setdefault(len(word) - 1, {}).setdefault(tuple(word[:-1]), set()).add(word[-1])
        self.groups = sorted(groups.items())
        self.longest = self.groups[-1][0] if self.groups else 0

    def collect(self, history: TokenHistory, banned: set[int]) -> None:
        """Add the ids that would complete a bad word to `banned`."""
        tail = history.tail(self.longest)
        size = len(tail)
        for length, words in self.groups:
            if length <= size:
                banned.update(words.get(tail[size - length :], ()))


class NgramTable:
    """Which ids followed each (n-1)-gram of the history; grows by one entry per token, never rescans."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"an n-gram has at least one token, not {size}")
        self.size = size
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self._indexed = 0

    def extend(self, history: TokenHistory) -> None:
        """Index the tokens that were appended to the history since the last call."""
        new = history.length - self._indexed
        if new <= 0:
            return
        context = self.size - 1
        tokens = history.tail(new + context)
        for end in range(len(tokens) - new, len(tokens)):
            if end >= context:
                self._followers.setdefault(tokens[end - context : end], set()).add(tokens[end])
        self._indexed = history.length

    def collect(self, history: TokenHistory, banned: set[int]) -> None:
        """Add the ids that would repeat an n-gram of the history to `banned`."""
        self.extend(history)
        tail = history.tail(self.size - 1)
        if len(tail) == self.size - 1:
            banned.update(self._followers.get(tail, ()))


class Constraints:
    """One request's bans on the next token and its finish checks."""

    def __init__(self, params: GenerationParams) -> None:
        self._params = params
        size = params.no_repeat_ngram_size
        self._ngrams = NgramTable(size) if size > 0 else None
        self._bad_words = BadWordTable(params.bad_words) if params.bad_words else None
        self._stop_words = SuffixTable(params.stop_words) if params.stop_words else None
        self._min_length = params.min_length if params.eos_token_id is not None else 0
        self.may_ban = bool(self._ngrams or self._bad_words or self._min_length > 0)

    def banned(self, history: TokenHistory) -> set[int]:
        """Ids whose logit is set to -1e9 for the next token."""
        banned: set[int] = set()
        if self._ngrams is not None:
            self._ngrams.collect(history, banned)
        if history.length < self._min_length and self._params.eos_token_id is not None:
            banned.add(self._params.eos_token_id)
        if self._bad_words is not None:
            self._bad_words.collect(history, banned)
        return banned

    def finish(self, history: TokenHistory) -> FinishReason | None:
        """Why the request ends now that its newest token is in the history; None if it goes on."""
        params = self._params
        if history.length >= params.max_length:
            return FinishReason.LENGTH
        if params.early_stopping and history.tail(1)[0] == params.eos_token_id:
            return FinishReason.EOS
        if self._stop_words is not None and self._stop_words.ends(history):
            return FinishReason.STOP_WORDS
        return None
