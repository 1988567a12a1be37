"""Where one request stands in its document, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.grammar import short_reason


class Guide:
    """A matcher that has read what was generated so far; used by one thread at a time.

    `ends` are the eos tokens. Where there is none, the id `hidden` stands for the end of the document: it is
    never allowed, and the request ends instead.
    """

    __slots__ = ("_ends", "_has_ended", "_hidden", "matcher")

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], hidden: int | None) -> None:
        self.matcher = matcher
        self._ends = ends
        self._hidden = hidden
        self._has_ended = False

    def restarted(self) -> Guide:
        """A guide of its own for the same document, at its beginning."""
        matcher = self.matcher.deep_copy()
        matcher.reset()
        return Guide(matcher, self._ends, self._hidden)

    def replay(self, tokens: Sequence[int]) -> None:
        """Read tokens that were generated elsewhere. Raises GuideError if the document forbids them."""
        if tokens and not self.matcher.consume_tokens(list(tokens)):
            raise GuideError(f"the tokens generated so far do not follow the document: {self.problem}")
        self._has_ended = bool(tokens) and tokens[-1] in self._ends

    def advance(self, token: int) -> None:
        """Read a token that was just generated."""
        self.matcher.consume_token(token)
        self._has_ended = token in self._ends

    @property
    def problem(self) -> str:
        """Why the document cannot go on; empty while it can."""
        return short_reason(self.matcher.get_error()) if self.matcher.is_error() else ""

    @property
    def may_end(self) -> bool:
        """The document is complete as it is, and the request has no eos token to say so."""
        return self._hidden is not None and self.matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """The document is complete, and neither a token nor eos can follow."""
        if self._has_ended or self._hidden is None:
            return self._has_ended
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def finish_mask(self, row: NDArray[np.int32]) -> None:
        """Correct the library's mask [words] for this place; bit i of word w is id 32 w + i."""
        if self.matcher.is_error():
            row[:] = 0  # the library then allows eos, as if the document were complete
        elif self._hidden is not None:
            row[self._hidden // 32] &= ~np.uint32(1 << self._hidden % 32).view(np.int32)
