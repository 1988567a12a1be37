"""Embeddings that a request brings along for some of its prompt tokens (rich text)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from allspark_workers.engine.step_plan import Row

# Per piece: the token of the step that it begins with, values [rows, hidden].
GivenEmbeddings = list[tuple[int, NDArray[np.float32]]]


def given_embeddings(rows: list[Row]) -> GivenEmbeddings:
    """What the requests of a step bring along for its tokens."""
    given: GivenEmbeddings = []
    offset = 0
    for row in rows:
        end = row.start + row.count
        for run in row.sequence.request.embeddings:
            first, last = max(run.start, row.start), min(run.start + len(run.values), end)
            if first < last:
                values = run.values[first - run.start : last - run.start]
                given.append((offset + first - row.start, values))
        offset += row.count
    return given


def replace_embeddings(embedded: torch.Tensor, given: GivenEmbeddings) -> torch.Tensor:
    """Overwrite rows of `embedded` [T, H], the tokens of a step."""
    for at, values in given:
        embedded[at : at + len(values)] = torch.from_numpy(values).to(embedded)
    return embedded
