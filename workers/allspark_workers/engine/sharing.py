"""Which tokens of a sequence may be read from spans that another sequence of the same request has filled.

K and V of a token depend on the tokens up to it and on nothing else, so any common prefix can be shared. At
least the newest token of every sequence is computed by itself: it yields the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from allspark_workers.engine.sequence import NO_ROW, Sequence


class Gang:
    """Sequences of equal length that enter and leave the batch together and advance in step (beams).

    The first leads: it alone is queued, and computes the `trunk` that all have in common; the others go on
    from there (`has_branched`). Only the first `num_active` have something to compute, the rest hold their
    batch rows. `forget` is called when all is to be computed from the prompt again.
    """

    def __init__(self, members: list[Sequence], forget: Callable[[], None]) -> None:
        self.members = members
        self.num_active = 1
        self.trunk = 0
        self.has_branched = False
        self._forget = forget
        for member in members:
            member.gang = self

    @property
    def leader(self) -> Sequence:
        """The member that is queued."""
        return self.members[0]

    def active(self) -> list[Sequence]:
        """Members that have tokens of their own to compute."""
        return self.members[: self.num_active]

    def measure(self) -> None:
        """Find the trunk of the active members."""
        first, *others = self.active()
        lengths = [common_prefix(first, other) for other in others]
        self.trunk = min([first.length - 1, *lengths])

    def start_over(self) -> None:
        """Go back to the prompt; only while the gang waits. What comes is determined, so it comes again."""
        for member in self.members:
            member.replace(member.tokens, member.num_prompt)
        self.num_active = 1
        self._forget()

    def num_spans(self, span_size: int) -> int:
        """Spans that the gang needs to be computed from nothing; `measure` comes first."""
        own = -(-self.leader.length // span_size)
        return own + (self.num_active - 1) * (own - self.trunk // span_size)


def members_of(sequence: Sequence) -> Iterable[Sequence]:
    """The sequences that enter and leave the batch with this one, itself included."""
    return sequence.gang.members if sequence.gang is not None else (sequence,)


def leader_of(sequence: Sequence) -> Sequence:
    """The one of them that is queued."""
    return sequence.gang.leader if sequence.gang is not None else sequence


def common_prefix(a: Sequence, b: Sequence) -> int:
    """How many tokens the beginnings of two sequences of one request have in common: at least the prompt."""
    start, end = a.num_prompt, min(a.length, b.length)
    differs = np.flatnonzero(a.tokens[start:end] != b.tokens[start:end])
    return start + int(differs[0]) if len(differs) else end


def best_donor(sequence: Sequence) -> tuple[Sequence | None, int, int]:
    """The running sibling that has most of this sequence's tokens: (it, tokens computed, tokens to come).

    Tokens to come will be computed by it, so waiting for them is better than computing them twice.
    """
    best: tuple[Sequence | None, int, int] = (None, 0, 0)
    for other in sequence.siblings:
        if other is sequence or other.row == NO_ROW:
            continue
        common = min(common_prefix(sequence, other), sequence.length - 1)
        if common > best[1] + best[2]:
            computed = min(common, other.num_computed)
            best = (other, computed, common - computed)
    return best
