"""What the scheduler decides for one step. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from allspark_workers.engine.sequence import NO_ROW, Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `start .. start+count-1` of one request; the last of them yields a result if `samples`."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class StepPlan:
    """One step: decode rows first. `exhausted` requests cannot go on even with the whole pool.

    `copies` maps spans to those whose content they get, all at once, before anything is computed.
    """

    rows: list[Row] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    exhausted: list[Sequence] = field(default_factory=list)

    def copy(self, source: int, span: int) -> None:
        """Let `span` have the content that `source` has, or is about to get."""
        self.copies[span] = self.copies.get(source, source)

    def drop_rows_that_left(self) -> None:
        """Compute nothing for sequences that were pre-empted after their row was planned."""
        self.rows = [row for row in self.rows if row.sequence.row != NO_ROW]
