"""Requests of one model that wait for a worker: bounded, by priority, then age. Pure."""

import heapq
import itertools
from dataclasses import dataclass, field

from allspark_broker.affinity import Prefix


@dataclass(order=True, slots=True)
class Waiting:
    """A queued request. `epoch` is the one in the ledger; a dispatch raises it.

    `prefix` is what it is routed by, once that has been worked out.
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


class RequestQueue:
    """A bounded priority queue with removal by id. Requests that come back from a worker pass the bound."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._heap: list[tuple[tuple[int, int], int, Waiting]] = []
        self._live: dict[str, Waiting] = {}
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, rid: str) -> bool:
        return rid in self._live

    @property
    def is_full(self) -> bool:
        """Whether a new request must be denied."""
        return len(self._live) >= self.bound

    def push(self, waiting: Waiting) -> None:
        """Adds a request, or replaces the entry of the same id."""
        self._live[waiting.request_id] = waiting
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
            del self._live[waiting.request_id]
        return waiting

    def remove(self, rid: str) -> bool:
        """Forgets a request; False if it is not here."""
        return self._live.pop(rid, None) is not None

    def expired(self, now_ms: int) -> list[Waiting]:
        """Requests whose deadline has passed; they stay until removed."""
        return [w for w in self._live.values() if 0 < w.deadline_ms <= now_ms]

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        in_heap = {id(w) for _, _, w in self._heap}
        assert all(id(w) in in_heap for w in self._live.values()), "a live request is not in the heap"
