"""From scheduled rows to the arrays of a ragged step; vectorised over tokens, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from allspark_workers.engine.step_plan import Row

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """T tokens of B rows. `tokens` [3, T]: ids, positions, cache slots. `last` [R]: tokens to sample after.

    q_lens, kv_lens, decode_lens [B] and span_table [B, n] as in `allspark_kernels.plan_attention`.
    """

    tokens: Int64
    last: Int64
    q_lens: Int64
    kv_lens: Int64
    decode_lens: Int64
    span_table: NDArray[np.int32]

    @property
    def is_decode(self) -> bool:
        """Every row is one generated token."""
        return bool(self.tokens.shape[1] == len(self.q_lens) == self.decode_lens.sum())


def build_batch(rows: list[Row], span_table: NDArray[np.int32], span_size: int) -> RaggedBatch:
    """Gather ids, positions and slots of all rows; `span_table` is the scheduler's."""
    # One array for all: with few rows, making arrays costs more than filling them.
    facts = np.array(
        [(r.sequence.row, r.start, r.count, r.sequence.num_prompt, r.samples) for r in rows], np.int64
    )
    table_rows, starts, counts, prompts, samples = facts.T
    kv_lens = starts + counts
    ends = np.cumsum(counts)
    total = int(ends[-1])
    tokens = np.empty((3, total), np.int64)
    if total == len(rows):
        tokens[0] = [row.sequence.tokens[row.start] for row in rows]
        owners, positions = table_rows, starts
    else:
        pieces = [row.sequence.tokens[row.start : row.start + row.count] for row in rows]
        np.concatenate(pieces, out=tokens[0])
        owners = np.repeat(table_rows, counts)
        positions = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    tokens[1] = positions
    columns, offsets = np.divmod(positions, span_size)
    tokens[2] = span_table[owners, columns] * np.int64(span_size) + offsets
    width = -(-int(kv_lens.max()) // span_size)
    return RaggedBatch(
        tokens=tokens,
        last=ends[samples != 0] - 1,
        q_lens=counts,
        kv_lens=kv_lens,
        decode_lens=np.minimum(np.maximum(kv_lens - prompts, 0), counts),
        span_table=span_table[table_rows, :width],
    )
