"""The page ledger: who holds which spans of the KV cache. Pure bookkeeping, touches no memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from allspark_workers.engine.errors import LedgerError


class SpanKeeper(Protocol):
    """Knows which spans are worth keeping when nobody holds them any more: the prefix cache."""

    def keeps(self, span: int) -> bool:
        """The span has lost its last holder: whether its content is kept until the memory is needed."""

    def evict(self, span: int) -> None:
        """The memory of a kept span is given away now."""


class PageLedger:
    """Span ids 0..total-1, each either free or held by one or more owners, each holding it at most once.

    With a `keeper`, a free span may be idle: its content is kept until the memory is needed, the longest idle
    first. Idle spans count as free; `share` makes one held again.

    One span id stands for `2 * num_layers` frames: K and V of every layer for `span_size` tokens. A span with
    several holders is read-only for all of them: who wants to write takes a copy first (copy on write).
    Invariant, verified by `check`: free + held == total, and a span's count is the number of its holders.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a page ledger needs at least one span, got {total}")
        self.total = total
        # Last in, first out: a span that was just released is the likeliest to be in a cache.
        self._free = list(range(total - 1, -1, -1))
        self._held: dict[str, list[int]] = {}
        self._counts = [0] * total  # holders of each span
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.keeper: SpanKeeper | None = None

    @property
    def free(self) -> int:
        """Spans that nobody holds, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Spans that somebody holds."""
        return self.total - self.free

    @property
    def num_idle(self) -> int:
        """Spans that nobody holds and whose content is kept."""
        return len(self._idle)

    @property
    def longest_idle(self) -> int | None:
        """The span that is evicted next."""
        return next(iter(self._idle), None)

    def is_idle(self, span: int) -> bool:
        """Whether nobody holds the span and its content is kept."""
        return span in self._idle

    def discard(self, span: int) -> None:
        """Keep the content of an idle span no longer; nothing happens to a span that is not idle."""
        if span in self._idle:
            del self._idle[span]
            self._free.append(span)

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
        if count > self.free:
            return None
        if count == 0:
            return []
        while count > len(self._free):
            self._evict()
        cut = len(self._free) - count
        spans = self._free[cut:][::-1]
        del self._free[cut:]
        for span in spans:
            self._counts[span] = 1
        self._held.setdefault(owner, []).extend(spans)
        return spans

    def share(self, owner: str, spans: Sequence[int]) -> None:
        """Let `owner` hold spans that somebody else holds already, or that are idle; their order is kept.

        Raises LedgerError, changing nothing, for a span that is free or that `owner` holds already.
        """
        if not spans:
            return
        held = self._held.get(owner, [])
        if len({*spans, *held}) != len(spans) + len(held):
            raise LedgerError(f"{owner} would hold a span twice")
        if not all(0 <= span < self.total and (self._counts[span] or span in self._idle) for span in spans):
            raise LedgerError(f"{owner} cannot share a span that nobody holds")
        for span in spans:
            self._idle.pop(span, None)
            self._counts[span] += 1
        self._held.setdefault(owner, []).extend(spans)

    def is_shared(self, span: int) -> bool:
        """Whether several owners hold the span, so that none of them may write to it."""
        return self._counts[span] > 1

    def num_holders(self, span: int) -> int:
        """Owners of the span; 0: it is free."""
        return self._counts[span]

    def release(self, owner: str) -> int:
        """Take back everything `owner` holds and return how many spans that was (0 if none).

        A span becomes free when its last holder gives it back.
        """
        spans = self._held.pop(owner, None)
        if spans is None:
            return 0
        self._put_back(spans)
        return len(spans)

    def drop(self, owner: str, spans: Sequence[int]) -> None:
        """Take back some of the spans that `owner` holds.

        Raises LedgerError, changing nothing, for a span that it does not hold.
        """
        gone = set(spans)
        held = self._held.get(owner, [])
        kept = [span for span in held if span not in gone]
        if len(gone) != len(spans) or len(kept) + len(gone) != len(held):
            raise LedgerError(f"{owner} does not hold every span that it gives back, or gives one back twice")
        if kept:
            self._held[owner] = kept
        else:
            self._held.pop(owner, None)
        self._put_back(spans)

    def exchange(self, holdings: Mapping[str, Sequence[int]]) -> None:
        """Replace what each of these owners holds, in one move; spans that nobody keeps become free.

        Raises LedgerError, changing nothing, for a span that is free, or listed twice for one owner.
        """
        for owner, spans in holdings.items():
            if len(set(spans)) != len(spans):
                raise LedgerError(f"{owner} would hold a span twice")
            if not all(0 <= span < self.total and self._counts[span] for span in spans):
                raise LedgerError(f"{owner} cannot take over a span that nobody holds")
        before = [self._held.pop(owner, []) for owner in holdings]
        for owner, spans in holdings.items():
            for span in spans:
                self._counts[span] += 1
            if spans:
                self._held[owner] = list(spans)
        for given in before:
            self._put_back(given)

    def num_releasable(self, owners: Iterable[str], among: Collection[int] | None = None) -> int:
        """Spans (of these) that would become free if all these owners gave back what they hold."""
        holders: dict[int, int] = {}
        for owner in set(owners):
            for span in self._held.get(owner, ()):
                holders[span] = holders.get(span, 0) + 1
        return sum(
            self._counts[span] == count for span, count in holders.items() if among is None or span in among
        )

    def _put_back(self, spans: Sequence[int]) -> None:
        for span in reversed(spans):
            self._counts[span] -= 1
            if self._counts[span] == 0:
                if self.keeper is not None and self.keeper.keeps(span):
                    self._idle[span] = None
                else:
                    self._free.append(span)

    def _evict(self) -> None:
        span, _ = self._idle.popitem(last=False)
        self._free.append(span)
        if self.keeper is not None:
            self.keeper.evict(span)

    def check(self) -> None:
        """Raise LedgerError unless free + held == total and every count is the number of holders."""
        counts = [0] * self.total
        for owner, spans in self._held.items():
            if len(set(spans)) != len(spans):
                raise LedgerError(f"{owner} holds a span twice")
            for span in spans:
                if not 0 <= span < self.total:
                    raise LedgerError(f"{owner} holds span {span}, which is outside the pool")
                counts[span] += 1
        num_held = sum(count > 0 for count in counts)
        unheld = [*self._free, *self._idle]
        if len(unheld) + num_held != self.total:
            raise LedgerError(f"{len(unheld)} free + {num_held} held spans != {self.total} in total")
        if len({*unheld}) != len(unheld) or any(counts[span] for span in unheld):
            raise LedgerError("a span is free twice, or free and held")
        if counts != self._counts:
            wrong = next(span for span in range(self.total) if counts[span] != self._counts[span])
            raise LedgerError(f"span {wrong} counts {self._counts[wrong]} holders, {counts[wrong]} hold it")
        empty = [owner for owner, spans in self._held.items() if not spans]
        if empty:
            raise LedgerError(f"owners without spans are still listed: {empty[:5]}")
