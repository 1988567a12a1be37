"""The page ledger: who holds which spans of the KV cache. Pure bookkeeping, touches no memory."""

from __future__ import annotations

from allspark_workers.engine.errors import LedgerError


class PageLedger:
    """Span ids 0..total-1, each either free or held by exactly one owner.

    One span id stands for `2 * num_layers` frames: K and V of every layer for `span_size` tokens.
    Invariant, verified by `check`: free + held == total, and nobody shares a span.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page ledger needs at least one span, got {total}")
        self.total = total
        # Last in, first out: a span that was just released is the likeliest to be in a cache.
        self._free = list(range(total - 1, -1, -1))
        self._held: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        """Spans that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Spans that somebody holds."""
        return self.total - len(self._free)

    def held_by(self, owner: str) -> int:
        """Spans that `owner` holds."""
        return len(self._held.get(owner, ()))

    def owners(self) -> frozenset[str]:
        """Everybody who holds at least one span."""
        return frozenset(self._held)

    def allocate(self, owner: str, count: int) -> list[int] | None:
        """Give `owner` `count` more spans, all or none; None (and no change) if fewer are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} spans")
        if count > len(self._free):
            return None
        if count == 0:
            return []
        cut = len(self._free) - count
        spans = self._free[cut:][::-1]
        del self._free[cut:]
        self._held.setdefault(owner, []).extend(spans)
        return spans

    def release(self, owner: str) -> int:
        """Take back everything `owner` holds and return how many spans that was (0 if none)."""
        spans = self._held.pop(owner, None)
        if spans is None:
            return 0
        self._free.extend(reversed(spans))
        return len(spans)

    def check(self) -> None:
        """Raise LedgerError unless free + held == total and no span appears twice."""
        held = [span for spans in self._held.values() for span in spans]
        if len(self._free) + len(held) != self.total:
            raise LedgerError(f"{len(self._free)} free + {len(held)} held spans != {self.total} in total")
        seen = set(self._free) | set(held)
        if len(seen) != self.total or (seen and (min(seen) < 0 or max(seen) >= self.total)):
            raise LedgerError("a span is free and held, or held twice, or outside the pool")
        empty = [owner for owner, spans in self._held.items() if not spans]
        if empty:
            raise LedgerError(f"owners without spans are still listed: {empty[:5]}")
