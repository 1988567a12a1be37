"""Requests whose result is more than one sequence's tokens: samples, beams, hidden states.

A family takes what each step computed for its sequences and says what that means for its request. Nothing of
it is in the stream before the end except the tokens of the first of several samples, so a request resumed
elsewhere computes the rest again; draws depend on logits, seed and position only, so it comes out equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from allspark_workers.engine.beams import BeamSearch, Candidates, Pick
from allspark_workers.engine.inference import HiddenStates, Inference
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.sharing import Gang
from allspark_workers.engine.types import EngineRequest, FinishReason, GenerationParams, Task

_MASK = (1 << 64) - 1

Tensors = Mapping[str, NDArray[Any]]


@dataclass(slots=True)
class Progress:
    """What a result means: `tokens` for the stream from `position` on (None: after those that it has).

    `num_generated` counts those of all sequences. `left` has ended and holds nothing any more, though the
    request goes on. `fork` is how a gang advances. `finish` ends the request; `message` says why it failed.
    """

    tokens: list[int] = field(default_factory=list)
    position: int | None = None
    num_generated: int = 0
    left: Sequence | None = None
    fork: list[Pick] | None = None
    finish: FinishReason | None = None
    message: str = ""


class Family(Protocol):
    """Results of one request. `queued` sequences are what the scheduler knows of it."""

    request: EngineRequest
    queued: list[Sequence]

    def take(self, sequence: Sequence, start: int, result: Any) -> Progress:
        """A row of this sequence that began at token `start` gave this result."""

    def num_published(self) -> int:
        """Tokens that the stream has or has been given."""

    def tensors(self) -> Tensors:
        """What goes with the terminal record, complete or as far as it got."""


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request; that of sequence 0 is the request's own.

    The others are SplitMix64 outputs (Steele, Lea and Flood, 2014) of state seed + index * golden gamma.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def sequence_params(params: GenerationParams, index: int) -> GenerationParams:
    """The settings of sequence `index`, as a request for it alone would have them."""
    return replace(
        params,
        num_return_sequences=1,
        top_ks=(),
        top_ps=(),
        seeds=(),
        top_k=params.top_ks[index] if params.top_ks else params.top_k,
        top_p=params.top_ps[index] if params.top_ps else params.top_p,
        seed=params.seeds[index] if params.seeds else sequence_seed(params.seed, index),
    )


def make_sequence(request: EngineRequest, serials: Iterator[int]) -> Sequence:
    """The first sequence of a request, with its family if it needs one."""
    family: Family
    if request.task is Task.INFER:
        family = InferenceFamily(request, serials)
    elif request.task is Task.PROBE:
        return Sequence(request, next(serials))
    elif request.params.num_beams > 1:
        family = BeamFamily(request, serials)
    elif request.params.num_return_sequences > 1:
        family = SampleFamily(request, serials)
    else:
        return Sequence(request, next(serials))
    return family.queued[0]


def _member_id(request: EngineRequest, index: int) -> str:
    # No tenant begins with "#", so this is no other request's id.
    return request.request_id if index == 0 else f"#{index} of {request.request_id}"


class SampleFamily:
    """Independent samples of one prompt; those after the first are delivered at the end."""

    def __init__(self, request: EngineRequest, serials: Iterator[int]) -> None:
        self.request = request
        self._reasons: dict[int, FinishReason] = {}
        count = request.params.num_return_sequences
        members = [Sequence(self._share_of(index), next(serials)) for index in range(count)]
        for member in members:
            member.family = self
            member.siblings = tuple(members)
        self.members = members
        self.queued = members

    def _share_of(self, index: int) -> EngineRequest:
        request, guide = self.request, self.request.guide
        return replace(
            request,
            request_id=_member_id(request, index),
            params=sequence_params(request.params, index),
            generated=request.generated if index == 0 else [],
            guide=guide.restarted() if index and guide is not None else guide,
        )

    def take(self, sequence: Sequence, start: int, result: int) -> Progress:
        """Append a token to its sequence."""
        if result < 0:
            reason, message = sequence.without_token()
            if reason is FinishReason.COMPLETE:
                return self.settle(sequence, reason)
            return Progress(finish=reason, message=message)
        index = self.members.index(sequence)
        progress = Progress(num_generated=1)
        if index == 0:
            progress.tokens, progress.position = [result], self.num_published()
        sequence.append(result)
        ended = sequence.finish()
        return progress if ended is None else self.settle(sequence, ended, progress)

    def settle(self, sequence: Sequence, reason: FinishReason, progress: Progress | None = None) -> Progress:
        """A sequence is complete; the request ends with the last of them, for the reason of the first."""
        progress = progress or Progress()
        if reason is FinishReason.GRAMMAR:
            progress.finish, progress.message = reason, sequence.explain(reason)
            return progress
        self._reasons[self.members.index(sequence)] = reason
        if len(self._reasons) == len(self.members):
            progress.finish = self._reasons[0]
        else:
            progress.left = sequence
        return progress

    def num_published(self) -> int:
        """All tokens of the first sequence."""
        return self.members[0].num_generated

    def tensors(self) -> Tensors:
        """The sequences after the first."""
        return {f"sequence_{i}": m.generated().copy() for i, m in enumerate(self.members[1:], 1)}


class BeamFamily:
    """The beams of one request: nothing is delivered before the end."""

    def __init__(self, request: EngineRequest, serials: Iterator[int]) -> None:
        self.request = request
        params = request.params
        serial = next(serials)
        members = [Sequence(self._share_of(index), serial) for index in range(params.num_beams)]
        for member in members:
            member.family = self
        self.gang = Gang(members, self._begin)
        self.queued = [members[0]]
        self._candidates: dict[int, Candidates] = {}
        self._is_over = False
        self._begin()

    def _begin(self) -> None:
        params = self.request.params
        self._search = BeamSearch(params.num_beams, params.length_penalty, params.early_stopping)
        self._candidates.clear()

    def _share_of(self, index: int) -> EngineRequest:
        params = sequence_params(self.request.params, 0)
        # A beam always ends at eos; what early_stopping says here is when the search does.
        params = replace(params, early_stopping=True, seed=sequence_seed(params.seed, index))
        return replace(self.request, request_id=_member_id(self.request, index), params=params)

    def take(self, sequence: Sequence, start: int, result: Candidates | None) -> Progress:
        """Candidates of one beam; with those of the last the search takes a step."""
        if result is None:
            return _no_logit()
        members = self.gang.active()
        self._candidates[self.gang.members.index(sequence)] = result
        sequence.is_parked = True
        # After a pre-emption what a beam had found is found again; until then it is not computed.
        if any(member.num_remaining for member in members):
            return Progress()
        found = [self._candidates[index] for index in range(len(members))]
        self._candidates.clear()
        picks = self._search.step(
            found,
            members[0].num_generated,
            lambda parent, token: members[parent].constraints.finish(_Followed(members[parent], token)),
            lambda parent: tuple(members[parent].generated().tolist()),
        )
        if picks is not None:
            return Progress(num_generated=len(picks), fork=picks)
        self._is_over = True
        best = self._search.hypotheses[0]
        return Progress(list(best.tokens), 0, len(members), finish=best.reason)

    def num_published(self) -> int:
        """Nothing is, before the end."""
        return 0

    def tensors(self) -> Tensors:
        """The hypotheses after the best, and the scores of all; nothing while the search goes on."""
        if not self._is_over:
            return {}
        kept = self._search.hypotheses[: self.request.params.num_return_sequences]
        tensors: dict[str, NDArray[Any]] = {
            f"sequence_{i}": np.array(h.tokens, np.int64) for i, h in enumerate(kept[1:], 1)
        }
        tensors["sequence_scores"] = np.array([h.score for h in kept], np.float32)
        return tensors


class _Followed:
    """A sequence's history with one more token."""

    def __init__(self, sequence: Sequence, token: int) -> None:
        self.length = sequence.length + 1
        self._sequence = sequence
        self._token = token

    def tail(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens, or all of them if there are fewer."""
        return (*self._sequence.tail(count - 1), self._token) if count else ()


class InferenceFamily:
    """One forward pass over the prompt: hidden states of all tokens and logits of the last."""

    def __init__(self, request: EngineRequest, serials: Iterator[int]) -> None:
        self.request = request
        sequence = Sequence(request, next(serials))
        sequence.family = self
        self.queued = [sequence]
        self._inference = Inference(len(request.prompt))

    def take(self, sequence: Sequence, start: int, result: HiddenStates) -> Progress:
        """The states of one chunk."""
        self._inference.put(start, result)
        return Progress(finish=FinishReason.INFERRED) if sequence.num_remaining == 0 else Progress()

    def num_published(self) -> int:
        """There are no tokens."""
        return 0

    def tensors(self) -> Tensors:
        """Both results, once the last chunk is there."""
        return self._inference.tensors()


def _no_logit() -> Progress:
    return Progress(finish=FinishReason.ERROR, message="the model produced no finite logit")
