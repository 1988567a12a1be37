"""A binary heap whose entries are addressed by key: removal marks an entry, and the marked are dropped later.

Every operation takes O(log n) amortised, and marked entries never outnumber the others by much.
"""

import heapq
import itertools
from collections.abc import Iterator

MAX_MARKED = 64  # on top of one for every live entry


class LazyHeap:
    """Keys by rank, lowest first; of equal ranks, the one that was pushed first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._live: dict[str, tuple[float, int]] = {}
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __contains__(self, key: str) -> bool:
        return key in self._live

    def push(self, key: str, rank: float) -> None:
        """Adds a key, or gives it another rank."""
        serial = next(self._serial)
        self._live[key] = rank, serial
        heapq.heappush(self._heap, (rank, serial, key))
        self._shrink()

    def first(self) -> str | None:
        """The key of the lowest rank, left in place."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def rank(self, key: str) -> float:
        """The rank of a key that is here."""
        return self._live[key][0]

    def remove(self, key: str) -> bool:
        """Forgets a key; False if it is not here."""
        if self._live.pop(key, None) is None:
            return False
        self._shrink()
        return True

    def _shrink(self) -> None:
        if len(self._heap) > 2 * len(self._live) + MAX_MARKED:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def up_to(self, limit: float) -> list[str]:
        """Keys whose rank is `limit` or less, in no order; takes time for those alone (and marked ones)."""
        found, open_ = [], [0]
        while open_:
            index = open_.pop()
            if index < len(self._heap) and self._heap[index][0] <= limit:
                if self._is_live(self._heap[index]):
                    found.append(self._heap[index][2])
                open_ += (2 * index + 1, 2 * index + 2)
        return found

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        return self._live.get(entry[2]) == entry[:2]

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        assert {entry[2] for entry in self._heap if self._is_live(entry)} == set(self._live)
        assert len(self._heap) <= 2 * len(self._live) + MAX_MARKED, "removed keys pile up"
