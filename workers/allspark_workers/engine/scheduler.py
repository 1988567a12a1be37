"""Which tokens of which requests go through the model in the next step. Pure: no torch, no clock of its own.

Continuous batching with chunked prefill: every running request that lacks only its newest token decodes;
then prompts are computed in chunks, up to a token budget. Memory is given at admission for every token known
then, and one span at a time while decoding; when spans run out, the request served last is pre-empted: its
spans are released, and it is computed again from its tokens once there is room. Sequences of one request
share the spans of what they have in common (`sharing`); one that writes to a shared span gets a copy first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from allspark_workers.engine.beams import Pick
from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.prefix_cache import Node, PrefixCache
from allspark_workers.engine.sequence import NO_ROW, Sequence
from allspark_workers.engine.sharing import Gang, best_donor, leader_of, members_of
from allspark_workers.engine.step_plan import Row, StepPlan
from allspark_workers.engine.turns import in_turns, take_turn


def _turn(sequence: Sequence) -> int:
    return sequence.turn


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
        self._copies: dict[int, int] = {}  # for the next plan
        self.prefix: PrefixCache | None = None

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

    def next_wake_s(self) -> float | None:
        """When there is something to do without a command: a deadline passes, or a cached span expires."""
        expiry_s = self.prefix.next_expiry_s() if self.prefix is not None else None
        times = [*self._deadlines.values()] if expiry_s is None else [*self._deadlines.values(), expiry_s]
        return min(times, default=None)

    def spans_for(self, num_tokens: int) -> int:
        """Spans that hold `num_tokens` tokens."""
        return -(-num_tokens // self.span_size)

    def spans_alone(self, sequence: Sequence) -> int:
        """Spans that a waiting sequence needs if it shares nothing with others that are running."""
        gang = sequence.gang
        if gang is None:
            return self.spans_for(sequence.length)
        gang.measure()
        return gang.num_spans(self.span_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        if sequence.request_id in self._by_id:
            raise ValueError(f"request {sequence.request_id} is already live")
        self._by_id[sequence.request_id] = sequence
        if sequence.request.deadline_s is not None:
            self._deadlines[sequence.request_id] = sequence.request.deadline_s
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that has ended and release what it holds."""
        if self._by_id.get(sequence.request_id) is not sequence:
            raise ValueError(f"request {sequence.request_id} is not live")
        del self._by_id[sequence.request_id]
        self._deadlines.pop(sequence.request_id, None)
        if sequence.row == NO_ROW:
            self.waiting.remove(sequence)
        for member in members_of(sequence):
            if member.row != NO_ROW:
                self._leave(member)
            member.is_done = True

    def schedule(self) -> StepPlan:
        """Plan the next step; the rows' tokens count as computed only after `commit`."""
        plan = StepPlan(copies=self._copies)
        self._copies = {}
        if self.prefix is not None:
            self.prefix.expire()
        self._plan_decode(plan)
        budget = self._plan_prefill(plan, self.prefill_budget)
        self._admit(plan, budget)
        return plan

    def commit(self, row: Row) -> None:
        """The row went through the model."""
        seq = row.sequence
        seq.num_computed = row.start + row.count
        if self.prefix is not None and row.start < seq.num_prompt:
            self.prefix.extend(seq)
            self._hold(seq, seq.spans)
        gang = seq.gang
        if gang is not None and not gang.has_branched and gang.leader.num_computed >= gang.trunk:
            self._branch(gang)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running request back to the queue; its tokens stay, its spans do not."""
        for member in members_of(sequence):
            self._leave(member)
            member.num_computed = 0
        self.num_preemptions += 1
        self.waiting.append(leader_of(sequence))

    def fork(self, gang: Gang, picks: list[Pick]) -> None:
        """Advance a gang: member i goes on with the tokens of member `picks[i].parent` and its token.

        Every active member is running and computed up to its newest token. Spans are shared, not copied.
        """
        parents = [gang.members[pick.parent] for pick in picks]
        spans = [list(parent.spans) for parent in parents]
        tokens = [parent.followed_by(pick.token) for parent, pick in zip(parents, picks, strict=True)]
        length = gang.leader.length
        self.ledger.exchange({m.request_id: own for m, own in zip(gang.members, spans, strict=True)})
        for member, own, known in zip(gang.members, spans, tokens, strict=True):
            member.replace(known, length + 1)
            member.num_computed = length
            member.is_parked = False
            self._hold(member, own)
        gang.num_active = len(gang.members)

    def check(self) -> None:
        """Raise unless the ledger balances and exactly the running requests hold spans and rows."""
        self.ledger.check()
        if self.prefix is not None:
            self.prefix.check()
        running = {seq.request_id for seq in self.running}
        if self.ledger.owners() != running:
            raise ValueError(f"spans held by {set(self.ledger.owners()) ^ running}, who are not running")
        rows = [seq.row for seq in self.running] + self._free_rows
        if sorted(rows) != list(range(self.max_batch)):
            raise ValueError("batch rows are lost or doubled")
        leaders = [seq for seq in self.running if seq is leader_of(seq)]
        if len(leaders) + len(self.waiting) != len(self._by_id):
            raise ValueError("a live request is neither waiting nor running")

    def _plan_decode(self, plan: StepPlan) -> None:
        for seq in tuple(self.running):
            if seq.row == NO_ROW or seq.is_held or seq.is_parked or seq.num_remaining != 1:
                continue
            if self._reserve_next(seq, plan):
                plan.rows.append(Row(seq, seq.num_computed, 1, not seq.is_probe))
        if plan.preempted:
            plan.drop_rows_that_left()

    def _reserve_next(self, seq: Sequence, plan: StepPlan) -> bool:
        """Give the newest token a span it may write to, at the cost of requests that are served later."""
        while self._lacks_span(seq):
            spans = self.ledger.allocate(seq.request_id, 1)
            if spans is not None:
                self._add_span(seq, spans[0], plan)
                return True
            victim = self._victim()
            mates = members_of(victim)
            if seq in mates and len(self.running) == len(tuple(mates)):
                plan.exhausted.append(leader_of(seq))
                return False
            self.preempt(victim)
            plan.preempted.append(victim)
            if seq.row == NO_ROW:
                return False
        return True

    def _lacks_span(self, seq: Sequence) -> bool:
        if len(seq.spans) * self.span_size < seq.length:
            return True
        gang = seq.gang
        return gang is not None and gang.num_active > 1 and self.ledger.is_shared(seq.spans[-1])

    def _add_span(self, seq: Sequence, span: int, plan: StepPlan) -> None:
        """Append a span, or put it in the place of a shared last one, whose content it gets."""
        column = (seq.length - 1) // self.span_size
        if column < len(seq.spans):
            shared = seq.spans.pop()
            self.ledger.drop(seq.request_id, [shared])
            plan.copy(shared, span)
        self.span_table[seq.row, column] = span
        seq.spans.append(span)

    def _victim(self) -> Sequence:
        """Held requests first (they make no progress), then of the tenant whose turn came last the lowest."""
        held = next((seq for seq in reversed(self.running) if seq.is_held), None)
        tenant = self.running[-1].request.tenant
        return held or max((s for s in self.running if s.request.tenant == tenant), key=lambda seq: seq.order)

    def _plan_prefill(self, plan: StepPlan, budget: int) -> int:
        due = [s for s in self.running if not s.is_held and not s.is_parked and s.num_remaining > 1]
        for seq in in_turns(due):
            if budget == 0:
                break
            budget -= self._add_chunk(seq, plan, budget)
        return budget

    def _add_chunk(self, seq: Sequence, plan: StepPlan, budget: int) -> int:
        if self.prefix is not None and seq.num_computed < seq.num_prompt:
            self.prefix.skip(seq)
            self._hold(seq, seq.spans)
        count = min(seq.num_remaining, budget)
        is_last = seq.num_computed + count == seq.length
        samples = (is_last and not seq.is_probe) or seq.is_inference
        plan.rows.append(Row(seq, seq.num_computed, count, samples))
        return count

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting requests in turn; the first that does not fit blocks those behind it (fairness)."""
        if plan.preempted:
            return  # spans are short: what was just released is not for those who came later
        for seq in in_turns(self.waiting):
            if budget == 0:
                return
            if seq.is_held or seq.is_waiting_for_adapter:
                continue
            if self.spans_alone(seq) > self.ledger.total and not self._start_over(seq):
                plan.exhausted.append(seq)
                continue
            if seq.siblings and best_donor(seq)[2]:
                continue  # a sibling is about to compute what this one would compute again
            if not self._make_room(seq, plan):
                return
            self._enter(seq, plan)
            budget -= self._add_chunk(seq, plan, budget)

    def _start_over(self, seq: Sequence) -> bool:
        """Whether a gang that cannot be computed again as it stands fits from its prompt on.

        While it ran its members may have shared more than they have in common with the leader.
        """
        if seq.gang is None or seq.gang.num_active == 1:
            return False
        seq.gang.start_over()
        return self.spans_alone(seq) <= self.ledger.total

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """Whether `seq` can start now; pre-empts requests of lower priority if that is what it takes."""
        need, need_rows, shared = self._needs(seq)
        free, rows, num_running = self.ledger.free, len(self._free_rows), len(self.running)
        lower = [o for o in self.running if o is leader_of(o) and seq.may_preempt(o)]
        lower.sort(key=lambda other: (other.is_held, other.order), reverse=True)  # held, then lowest first
        victims: list[Sequence] = []
        gone: list[str] = []
        # Each running request may soon need one more span: admitting into that reserve would thrash.
        while rows < need_rows or need + num_running > free:
            if len(victims) == len(lower):
                return False
            victim = lower[len(victims)]
            victims.append(victim)
            gone += [member.request_id for member in members_of(victim)]
            gain = self.ledger.num_releasable(gone) - self.ledger.num_releasable(gone, shared)
            free = self.ledger.free + gain
            rows, num_running = len(self._free_rows) + len(gone), len(self.running) - len(gone)
        for victim in victims:
            self.preempt(victim)
        if victims:
            plan.preempted += victims
            plan.drop_rows_that_left()
        return True

    def _needs(self, seq: Sequence) -> tuple[int, int, set[int]]:
        """Free spans and rows that a waiting sequence needs to start, and cached spans that it shares."""
        shared = self.prefix.shared_spans(self._cached(seq)) if self.prefix is not None else set()
        if seq.gang is not None:
            return self.spans_alone(seq) - len(shared), len(seq.gang.members), shared
        _, inherited, _ = best_donor(seq)
        return self.spans_for(seq.length) - inherited // self.span_size - len(shared), 1, shared

    def _cached(self, seq: Sequence) -> list[Node]:
        """What a sequence takes from the prefix cache if it starts now; a running sibling has more."""
        if self.prefix is None or best_donor(seq)[0] is not None:
            return []
        return self.prefix.match(seq)

    def _enter(self, seq: Sequence, plan: StepPlan) -> None:
        take_turn(seq, self.waiting)
        self.waiting.remove(seq)
        if seq.gang is not None:
            self._enter_gang(seq.gang)
            return
        donor, inherited, _ = best_donor(seq)
        if donor is None:
            self._seat_first(seq)
            return
        full = inherited // self.span_size
        own = self._seat(seq, donor.spans[:full])
        if inherited % self.span_size:
            plan.copy(donor.spans[full], own[0])
        seq.inherit(inherited)

    def _enter_gang(self, gang: Gang) -> None:
        """Seat all members; those that have nothing to compute yet hold the leader's spans."""
        self._seat_first(gang.leader)
        gang.has_branched = False
        spans = gang.leader.spans
        for index, member in enumerate(gang.members[1:], 1):
            if index < gang.num_active:
                self._seat(member, spans[: gang.trunk // self.span_size])
            else:
                self._take_row(member)
                self.ledger.share(member.request_id, spans)
                self._hold(member, list(spans))
            member.is_parked = True

    def _branch(self, gang: Gang) -> None:
        """The leader has computed what all members have in common: the others go on from there."""
        gang.has_branched = True
        full, rest = divmod(gang.trunk, self.span_size)
        for member in gang.active()[1:]:
            if rest:
                self._copies[member.spans[full]] = gang.leader.spans[full]
            member.inherit(gang.trunk)
            member.is_parked = False

    def _seat_first(self, seq: Sequence) -> None:
        """Seat a sequence that has no running sibling: it begins with what the prefix cache has."""
        chain = self._cached(seq)
        if self.prefix is None or not chain:
            self._seat(seq, [])
            return
        spans = self.prefix.adopt(seq, chain)
        self._take_row(seq)
        self._hold(seq, spans)

    def _seat(self, seq: Sequence, shared: list[int]) -> list[int]:
        """A batch row, the spans `shared`, and as many of its own as its tokens need; the latter."""
        self.ledger.share(seq.request_id, shared)
        own = self.ledger.allocate(seq.request_id, self.spans_for(seq.length) - len(shared))
        if own is None:
            raise ValueError(f"request {seq.request_id} was admitted without room for it")
        self._take_row(seq)
        self._hold(seq, shared + own)
        return own

    def _take_row(self, seq: Sequence) -> None:
        seq.row = self._free_rows.pop()
        seq.is_marked = False
        seq.turn = leader_of(seq).turn
        insort(self.running, seq, key=_turn)

    def _hold(self, seq: Sequence, spans: list[int]) -> None:
        seq.spans = spans
        self.span_table[seq.row, : len(spans)] = spans

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.ledger.release(seq.request_id)
        if self.prefix is not None:
            self.prefix.leave(seq)
        self._free_rows.append(seq.row)
        seq.spans = []
        seq.row = NO_ROW
        seq.is_marked = False
        seq.is_parked = False
