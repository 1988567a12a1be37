"""Requests of one model that wait for a worker: bounded, by priority, then age. Pure."""

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field

from allspark_broker.affinity import Prefix

#: Bodies of the waiting requests of one model; those beyond it are read again from the ledger.
MAX_BODY_BYTES = 64 << 20
HEAP_SLACK = 64


@dataclass(order=True, slots=True)
class Waiting:
    """A queued request. `epoch` is the one in the ledger; a dispatch raises it.

    `prefix` is what it is routed by, once that has been worked out. Without a `body` the ledger has it.
    """

    rank: tuple[int, int] = field(init=False)
    request_id: str = field(compare=False)
    epoch: int = field(compare=False)
    priority: int = field(compare=False)
    created_ms: int = field(compare=False)
    deadline_ms: int = field(compare=False, default=0)
    body: bytes = field(compare=False, default=b"", repr=False)
    resume: bool = field(compare=False, default=False)
    prefix: Prefix | None = field(compare=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self.rank = (-self.priority, self.created_ms)

    def is_late(self, now_ms: int) -> bool:
        """Whether its deadline has passed."""
        return 0 < self.deadline_ms <= now_ms


class RequestQueue:
    """A bounded priority queue with removal by id. Requests that come back from a worker pass the bound.

    `promised`: places of requests that are being recorded and will be pushed. `max_body_bytes` bounds what
    the bodies take that are kept here.
    """

    def __init__(self, bound: int, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.bound = bound
        self.promised = 0
        self.body_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._heap: list[tuple[tuple[int, int], int, Waiting]] = []
        self._live: dict[str, Waiting] = {}
        self._by_priority: Counter[int] = Counter()
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, rid: str) -> bool:
        return rid in self._live

    @property
    def is_full(self) -> bool:
        """Whether a new request must be denied."""
        return len(self._live) + self.promised >= self.bound

    def may_keep(self, num_bytes: int) -> bool:
        """Whether a body of that size may stay with its request."""
        return self.body_bytes + num_bytes <= self._max_body_bytes

    def ahead_of(self, priority: int) -> int:
        """How many would be served before a new request of that priority."""
        return sum(count for other, count in self._by_priority.items() if other >= priority)

    def push(self, waiting: Waiting) -> None:
        """Adds a request, or replaces the entry of the same id."""
        self.remove(waiting.request_id)
        self._live[waiting.request_id] = waiting
        self._by_priority[waiting.priority] += 1
        self.body_bytes += len(waiting.body)
        heapq.heappush(self._heap, (waiting.rank, next(self._serial), waiting))

    def peek(self) -> Waiting | None:
        """The next request, left in place."""
        while self._heap and self._live.get(self._heap[0][2].request_id) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Waiting | None:
        """Takes the next request."""
        waiting = self.peek()
        if waiting is not None:
            heapq.heappop(self._heap)
            self.remove(waiting.request_id)
        return waiting

    def remove(self, rid: str) -> bool:
        """Forgets a request; False if it is not here."""
        waiting = self._live.pop(rid, None)
        if waiting is None:
            return False
        self._by_priority[waiting.priority] -= 1
        self.body_bytes -= len(waiting.body)
        self._shrink()
        return True

    def _shrink(self) -> None:
        """Entries that were removed out of turn may not pile up in the heap."""
        if len(self._heap) > 2 * len(self._live) + HEAP_SLACK:
            live = {id(w) for w in self._live.values()}
            self._heap = [entry for entry in self._heap if id(entry[2]) in live]
            heapq.heapify(self._heap)

    def expired(self, now_ms: int) -> list[Waiting]:
        """Requests whose deadline has passed; they stay until removed."""
        return [w for w in self._live.values() if w.is_late(now_ms)]

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        in_heap = {id(w) for _, _, w in self._heap}
        assert all(id(w) in in_heap for w in self._live.values()), "a live request is not in the heap"
        assert len(self._heap) <= 2 * len(self._live) + HEAP_SLACK + 1, "removed requests pile up"
        assert self.body_bytes == sum(len(w.body) for w in self._live.values())
        assert +self._by_priority == Counter(w.priority for w in self._live.values())
