"""Which tokens of which requests go through the model in the next step. Pure: no torch, no clock of its own.

Continuous batching with chunked prefill: every running request that lacks only its newest token decodes;
then prompts are computed in chunks, up to a token budget. Memory is given at admission for every token known
then, and one span at a time while decoding; when spans run out, the request served last is pre-empted: its
spans are released, and it is computed again from its tokens once there is room.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.sequence import NO_ROW, Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `start .. start+count-1` of one request; the last of them yields a new token if `samples`."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class StepPlan:
    """One step: decode rows first. `exhausted` requests cannot go on even with the whole pool."""

    rows: list[Row] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order


class Scheduler:
    """Owns the waiting and running requests and decides each step; every span goes through `ledger`.

    `span_table` [max_batch, spans of max_length] int32: row `sequence.row` lists that request's spans.
    """

    def __init__(
        self, ledger: PageLedger, span_size: int, max_batch: int, prefill_budget: int, max_length: int
    ) -> None:
        self.ledger = ledger
        self.span_size = span_size
        self.max_batch = max_batch
        self.prefill_budget = prefill_budget
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        columns = min(ledger.total, -(-max_length // span_size))
        self.span_table: NDArray[np.int32] = np.zeros((max_batch, columns), np.int32)
        self._free_rows = list(range(max_batch - 1, -1, -1))
        self._by_id: dict[str, Sequence] = {}
        self._deadlines: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._by_id.values()))

    def get(self, request_id: str) -> Sequence | None:
        """The live request of that id."""
        return self._by_id.get(request_id)

    def has_work(self) -> bool:
        """Whether `schedule` may find something to do."""
        return any(not seq.is_held for seq in self.running) or any(not seq.is_held for seq in self.waiting)

    def expired(self, now_s: float) -> list[Sequence]:
        """Live requests whose deadline has passed."""
        return [self._by_id[key] for key, deadline_s in self._deadlines.items() if deadline_s <= now_s]

    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a live request."""
        return min(self._deadlines.values(), default=None)

    def spans_for(self, num_tokens: int) -> int:
        """Spans that hold `num_tokens` tokens."""
        return -(-num_tokens // self.span_size)

    def fits_empty_pool(self, num_tokens: int) -> bool:
        """Whether a request of that many tokens could be computed with the pool to itself."""
        return self.spans_for(num_tokens) <= self.ledger.total

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        if sequence.request_id in self._by_id:
            raise ValueError(f"request {sequence.request_id} is already live")
        self._by_id[sequence.request_id] = sequence
        if sequence.request.deadline_s is not None:
            self._deadlines[sequence.request_id] = sequence.request.deadline_s
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that has ended and release what it holds."""
        if self._by_id.get(sequence.request_id) is not sequence:
            raise ValueError(f"request {sequence.request_id} is not live")
        del self._by_id[sequence.request_id]
        self._deadlines.pop(sequence.request_id, None)
        if sequence.row == NO_ROW:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        sequence.is_done = True

    def schedule(self) -> StepPlan:
        """Plan the next step; the rows' tokens count as computed only after `commit`."""
        plan = StepPlan()
        self._plan_decode(plan)
        budget = self._plan_prefill(plan, self.prefill_budget)
        self._admit(plan, budget)
        return plan

    def commit(self, row: Row) -> None:
        """The row went through the model."""
        row.sequence.num_computed = row.start + row.count

    def preempt(self, sequence: Sequence) -> None:
        """Send a running request back to the queue; its tokens stay, its spans do not."""
        self._leave(sequence)
        sequence.num_computed = 0
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def check(self) -> None:
        """Raise unless the ledger balances and exactly the running requests hold spans and rows."""
        self.ledger.check()
        running = {seq.request_id for seq in self.running}
        if self.ledger.owners() != running:
            raise ValueError(f"spans held by {set(self.ledger.owners()) ^ running}, who are not running")
        rows = [seq.row for seq in self.running] + self._free_rows
        if sorted(rows) != list(range(self.max_batch)):
            raise ValueError("batch rows are lost or doubled")
        if len(self.running) + len(self.waiting) != len(self._by_id):
            raise ValueError("a live request is neither waiting nor running")

    def _plan_decode(self, plan: StepPlan) -> None:
        for seq in tuple(self.running):
            if seq.row == NO_ROW or seq.is_held or seq.num_remaining != 1:
                continue
            if self._reserve_next(seq, plan):
                plan.rows.append(Row(seq, seq.num_computed, 1, True))

    def _reserve_next(self, seq: Sequence, plan: StepPlan) -> bool:
        """Make sure that the newest token has a span, at the cost of requests that are served later."""
        while len(seq.spans) * self.span_size < seq.length:
            spans = self.ledger.allocate(seq.request_id, 1)
            if spans is not None:
                self.span_table[seq.row, len(seq.spans)] = spans[0]
                seq.spans.extend(spans)
                return True
            victim = self._victim()
            if victim is seq and len(self.running) == 1:
                plan.exhausted.append(seq)
                return False
            self.preempt(victim)
            plan.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _victim(self) -> Sequence:
        """Held requests first (they make no progress), then the one served last."""
        return next((seq for seq in reversed(self.running) if seq.is_held), self.running[-1])

    def _plan_prefill(self, plan: StepPlan, budget: int) -> int:
        for seq in self.running:
            if budget == 0:
                break
            if not seq.is_held and seq.num_remaining > 1:
                budget -= self._add_chunk(seq, plan, budget)
        return budget

    def _add_chunk(self, seq: Sequence, plan: StepPlan, budget: int) -> int:
        count = min(seq.num_remaining, budget)
        plan.rows.append(Row(seq, seq.num_computed, count, seq.num_computed + count == seq.length))
        return count

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting requests in order; the first that does not fit blocks those behind it (fairness)."""
        if plan.preempted:
            return  # spans are short: what was just released is not for those who came later
        for seq in tuple(self.waiting):
            if budget == 0:
                return
            if seq.is_held:
                continue
            if not self.fits_empty_pool(seq.length):
                plan.exhausted.append(seq)
                continue
            if not self._make_room(seq, plan):
                return
            self._enter(seq)
            budget -= self._add_chunk(seq, plan, budget)

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """Whether `seq` can start now; pre-empts requests of lower priority if that is what it takes."""
        need = self.spans_for(seq.length)
        free, rows, num_running = self.ledger.free, len(self._free_rows), len(self.running)
        lower = [other for other in reversed(self.running) if other.order[0] > seq.order[0]]
        lower.sort(key=lambda other: not other.is_held)  # stable: held first, then the one served last
        victims: list[Sequence] = []
        # Each running request may soon need one more span: admitting into that reserve would thrash.
        while rows == 0 or need + num_running > free:
            if len(victims) == len(lower):
                return False
            victim = lower[len(victims)]
            victims.append(victim)
            free, rows, num_running = free + len(victim.spans), rows + 1, num_running - 1
        for victim in victims:
            self.preempt(victim)
        if victims:
            plan.preempted += victims
            plan.rows = [row for row in plan.rows if row.sequence.row != NO_ROW]
        return True

    def _enter(self, seq: Sequence) -> None:
        spans = self.ledger.allocate(seq.request_id, self.spans_for(seq.length))
        if spans is None:
            raise ValueError(f"request {seq.request_id} was admitted without room for it")
        self.waiting.remove(seq)
        seq.spans = spans
        seq.row = self._free_rows.pop()
        self.span_table[seq.row, : len(spans)] = spans
        seq.is_marked = False
        insort(self.running, seq, key=_order)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.ledger.release(seq.request_id)
        self._free_rows.append(seq.row)
        seq.spans = []
        seq.row = NO_ROW
        seq.is_marked = False
