"""Whose turn it is among requests of one worker: between tenants by arrival, within one by rank. Pure.

Brokers send requests as the tenants' turns come (start-time fair queueing), so each arrival is a turn of its
tenant. Which of the tenant's requests takes the turn is decided by rank (`service_order`) when it comes: a
request that overtakes others of its tenant takes the earliest turn of these, and leaves them its own. So
priorities order the requests of a tenant and win it nothing from others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from allspark_workers.engine.sequence import Sequence


def in_turns(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The order in which they are served."""
    turns = sorted(sequences, key=lambda seq: seq.turn)
    if len(turns) < 2:
        return turns
    by_rank: defaultdict[str, deque[Sequence]] = defaultdict(deque)
    for seq in sorted(turns, key=lambda seq: seq.order):
        by_rank[seq.request.tenant].append(seq)
    return [by_rank[turn.request.tenant].popleft() for turn in turns]


def take_turn(sequence: Sequence, waiting: Iterable[Sequence]) -> None:
    """`sequence`, one of those that wait, is served: it takes the earliest turn that its tenant has."""
    own = [seq for seq in waiting if seq.request.tenant == sequence.request.tenant]
    first = min(own, key=lambda seq: seq.turn)
    first.turn, sequence.turn = sequence.turn, first.turn
