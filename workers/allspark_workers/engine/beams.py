"""Beam search over candidate tokens: which beams go on and which are kept. Pure.

The rules, and the float32 sums, are those of `GenerationMixin._beam_search` of transformers 5 for a batch of
one: the first step looks at one beam only; of the 2 * num_beams best continuations, those that end are kept
if they are among the best num_beams, and the best others go on; a kept hypothesis is worth its
log-probability divided by (generated tokens ** length_penalty).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allspark_workers.engine.types import FinishReason

_NEVER = np.float32(-1e9)


class Candidates(NamedTuple):
    """The best continuations of one beam, best key first.

    `tokens` int64, `log_probs` float32, and `keys` float32: what they are ranked by, the log-probability or,
    if continuations are drawn, that plus Gumbel noise.
    """

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    keys: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam: its generated tokens, its score and why it ended."""

    tokens: tuple[int, ...]
    score: float
    reason: FinishReason


class Pick(NamedTuple):
    """A beam of the next step: that of `parent` with one token more."""

    parent: int
    token: int


# Why a beam ends with this token: (parent, token) -> reason, None if it goes on.
EndOf = Callable[[int, int], FinishReason | None]


class BeamSearch:
    """Scores of the running beams and the hypotheses kept so far.

    `length_penalty` and `early_stopping` as in transformers; `early_stopping` False stops once no running
    beam can beat the worst hypothesis if it ended now.
    """

    def __init__(self, num_beams: int, length_penalty: float, early_stopping: bool) -> None:
        self.num_beams = num_beams
        self.hypotheses: list[Hypothesis] = []  # best first, at most num_beams
        self.scores: NDArray[np.float32] = np.zeros(1, np.float32)  # of the running beams, best first
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    def step(
        self,
        candidates: Sequence[Candidates],
        num_generated: int,
        end_of: EndOf,
        tokens_of: Callable[[int], tuple[int, ...]],
    ) -> list[Pick] | None:
        """Take one step; the beams that go on, None if the search is over.

        `candidates[i]` belong to running beam i, which has generated the tokens `tokens_of(i)`.
        """
        picks, totals = self._best(candidates)
        reasons = [end_of(*pick) for pick in picks]
        size = np.float32(float(num_generated + 1) ** self._length_penalty)
        for pick, total, reason in list(zip(picks, totals, reasons, strict=True))[: self.num_beams]:
            if reason is not None:
                tokens = (*tokens_of(pick.parent), pick.token)
                self.hypotheses.append(Hypothesis(tokens, float(total / size), reason))
        self.hypotheses.sort(key=lambda kept: -kept.score)
        del self.hypotheses[self.num_beams :]
        # Ended continuations go on only where nothing else can: they cannot become hypotheses any more.
        running = totals + np.array([reason is not None for reason in reasons], np.float32) * _NEVER
        order = np.argsort(-running, kind="stable")[: self.num_beams]
        self.scores = running[order]
        if all(reason is not None for reason in reasons) or self._is_settled(size):
            return None
        return [picks[i] for i in order]

    def _best(self, candidates: Sequence[Candidates]) -> tuple[list[Pick], NDArray[np.float32]]:
        """The 2 * num_beams best continuations of all beams, best total log-probability first."""
        parents = np.repeat(np.arange(len(candidates)), [len(c.tokens) for c in candidates])
        tokens = np.concatenate([c.tokens for c in candidates])
        before = self.scores[parents]
        totals = np.concatenate([c.log_probs for c in candidates]) + before
        keys = np.concatenate([c.keys for c in candidates]) + before
        drawn = np.argsort(-keys, kind="stable")[: 2 * self.num_beams]
        order = drawn[np.argsort(-totals[drawn], kind="stable")]
        return [Pick(int(parents[i]), int(tokens[i])) for i in order], totals[order]

    def _is_settled(self, size: np.float32) -> bool:
        if len(self.hypotheses) < self.num_beams:
            return False
        worst = np.float32(self.hypotheses[-1].score)
        return self._early_stopping or not bool(self.scores[0] / size > worst)
