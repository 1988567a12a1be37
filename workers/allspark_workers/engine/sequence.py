"""A request inside the engine: its tokens, how many of them are in the KV cache, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from allspark_bus.service_order import rank
from numpy.typing import NDArray

from allspark_workers.engine.constraints import Constraints
from allspark_workers.engine.types import EngineRequest, FinishReason, Task

if TYPE_CHECKING:
    from allspark_workers.engine.families import Family
    from allspark_workers.engine.prefix_cache import Trail
    from allspark_workers.engine.sharing import Gang

MIN_GREEDY_TEMPERATURE = 1e-5
NO_ROW = -1


class Sequence:
    """State of one live request, or of one sequence of a request that has several.

    `length` tokens are known (prompt, then generated); the first `num_computed` of them have their K and V in
    `spans`. `row` is the batch slot (span-table row and penalty bitmask) while the request runs, else NO_ROW.

    `family`: what the request's results are collected in, None if they are one sequence's tokens. `siblings`:
    sequences with the same prompt, each scheduled by itself; `gang`: sequences that enter and leave the batch
    together. A parked sequence waits for others of its gang.
    """

    __slots__ = (
        "constraints",
        "family",
        "gang",
        "guide",
        "is_done",
        "is_held",
        "is_inference",
        "is_marked",
        "is_parked",
        "is_probe",
        "length",
        "num_cached",
        "num_computed",
        "num_prefilled",
        "num_prompt",
        "order",
        "request",
        "row",
        "sampling",
        "siblings",
        "spans",
        "tokens",
        "trail",
        "turn",
        "uses_penalties",
    )

    def __init__(self, request: EngineRequest, serial: int) -> None:
        self.request = request
        params = request.params
        self.num_prompt = len(request.prompt)
        self.length = self.num_prompt + len(request.generated)
        self.tokens: NDArray[np.int64] = np.empty(self.length + 64, np.int64)
        self.tokens[: self.num_prompt] = request.prompt
        self.tokens[self.num_prompt : self.length] = request.generated
        self.num_computed = 0
        self.num_prefilled = 0  # prompt tokens ever computed, for the statistics
        self.num_cached = 0  # prompt tokens taken from the prefix cache and not counted yet, likewise
        self.trail: Trail | None = None
        self.spans: list[int] = []
        self.row = NO_ROW
        self.is_held = False
        self.is_parked = False
        self.is_done = False
        self.is_probe = request.task is Task.PROBE
        self.is_inference = request.task is Task.INFER
        self.family: Family | None = None
        self.siblings: tuple[Sequence, ...] = ()
        self.gang: Gang | None = None
        self.is_marked = False  # the penalty bitmask of `row` holds this request's tokens
        self.constraints = Constraints(params)
        self.guide = request.guide
        # Among those of its tenant the lowest is served first; the serial number breaks ties.
        self.order = (rank(request.priority, request.arrival_s), serial)
        self.turn = serial  # see `turns`
        greedy = not params.do_sample or params.temperature < MIN_GREEDY_TEMPERATURE
        self.sampling = (
            0.0 if greedy else params.temperature,
            params.top_k,
            params.top_p,
            params.seed,
            params.repetition_penalty,
            params.presence_penalty,
            params.suppress_repetition,
        )
        self.uses_penalties = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt, those of earlier workers included."""
        return self.length - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Known tokens that still have to pass through the model; the last of them yields the next token."""
        return self.length - self.num_computed

    @property
    def is_waiting_for_adapter(self) -> bool:
        """Whether the request's adapter is not in memory yet."""
        adapter = self.request.adapter
        return adapter is not None and not adapter.is_in_force

    def may_preempt(self, running: Sequence) -> bool:
        """Whether a running request gives way to this one: its tenant's, of lower priority, served later.

        A tenant's priorities cost other tenants nothing, and what has aged enough is left alone.
        """
        mine, other = self.request, running.request
        is_lower = other.tenant == mine.tenant and other.priority < mine.priority
        return is_lower and running.order > self.order

    def count_prefilled(self) -> int:
        """Prompt tokens computed since the last call and never before: not again after a pre-emption."""
        new = max(0, min(self.num_computed, self.num_prompt) - self.num_prefilled)
        self.num_prefilled += new
        return new

    def count_cached(self) -> int:
        """Prompt tokens from the prefix cache since the last call; `count_prefilled` counts them too."""
        new, self.num_cached = self.num_cached, 0
        return new

    def generated(self) -> NDArray[np.int64]:
        """The generated tokens; a view."""
        return self.tokens[self.num_prompt : self.length]

    def inherit(self, num_tokens: int) -> None:
        """The first `num_tokens` are in `spans` already: another sequence has computed them."""
        self.num_computed = num_tokens
        if num_tokens:
            self.num_prefilled = self.num_prompt  # by that one

    def followed_by(self, token: int) -> NDArray[np.int64]:
        """The known tokens and one more, with room for others."""
        tokens = np.empty(self.length + 64, np.int64)
        tokens[: self.length] = self.tokens[: self.length]
        tokens[self.length] = token
        return tokens

    def replace(self, tokens: NDArray[np.int64], length: int) -> None:
        """Go on with other tokens; what was derived from the old ones is forgotten."""
        self.tokens, self.length = tokens, length
        self.num_prefilled = self.num_prompt
        self.constraints = Constraints(self.request.params)
        self.is_marked = False

    def finish(self) -> FinishReason | None:
        """Why the request ends now that its newest token is known; None if it goes on."""
        reason = self.constraints.finish(self)
        if reason is not None or self.guide is None:
            return reason
        if self.guide.is_complete:
            return FinishReason.COMPLETE
        return FinishReason.GRAMMAR if self.guide.problem else None

    def without_token(self) -> tuple[FinishReason, str]:
        """How the request ends for which no token could be drawn, and why."""
        if self.guide is not None and self.guide.problem:
            return FinishReason.GRAMMAR, self.explain(FinishReason.GRAMMAR)
        if self.guide is not None and self.guide.may_end:
            return FinishReason.COMPLETE, ""
        return FinishReason.ERROR, "the model produced no finite logit"

    def explain(self, reason: FinishReason) -> str:
        """What happened, where the reason alone does not say it."""
        if self.guide is None or reason is not FinishReason.GRAMMAR:
            return ""
        return f"guided decoding cannot go on after {self.num_generated} tokens: {self.guide.problem}"

    def append(self, token: int) -> None:
        """Add a generated token."""
        if self.length == len(self.tokens):
            self.tokens = np.concatenate((self.tokens, np.empty(self.length, np.int64)))
        self.tokens[self.length] = token
        self.length += 1
        if self.guide is not None:
            self.guide.advance(token)

    def tail(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens, or all of them if there are fewer."""
        return tuple(self.tokens[max(0, self.length - count) : self.length].tolist())
