"""Masks of the tokens that guided requests may generate next, filled in while the model computes."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from llguidance import LLExecutor
from numpy.typing import NDArray

from allspark_workers.engine.device import upload
from allspark_workers.engine.sequence import Sequence


class Masks:
    """`begin` before the forward pass, `take` after it; the batch is the same.

    A mask has one bit more than the vocabulary: a request without eos has a token for the end there.
    """

    def __init__(self, vocab_size: int, max_batch: int, device: torch.device) -> None:
        self._words = (vocab_size + 31) // 32
        self._shape = (max_batch, (vocab_size + 32) // 32)
        self._device = device
        self._buffer: NDArray[np.int32] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._pending: Future[None] | None = None
        self._rows = 0

    def begin(self, sequences: list[Sequence]) -> None:
        """Start to compute the masks of these sequences, if any of them is guided."""
        guided = [(index, seq) for index, seq in enumerate(sequences) if seq.guide is not None]
        if not guided:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "masks")
        self._rows = len(sequences)
        self._pending = self._threads.submit(self._fill, guided)

    def take(self) -> torch.Tensor | None:
        """Masks [B, ceil(V/32)] int32 of the sequences that `begin` got; None if none of them is guided."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        pending.result()
        assert self._buffer is not None
        rows = np.ascontiguousarray(self._buffer[: self._rows, : self._words])
        return upload(rows, torch.int32, self._device)

    def drop(self) -> None:
        """After a failed step: wait for what `begin` started and forget it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            wait([pending])

    def _fill(self, guided: list[tuple[int, Sequence]]) -> None:
        if self._buffer is None or self._executor is None:
            self._buffer = np.empty(self._shape, np.int32)
            self._executor = LLExecutor(max(1, (os.cpu_count() or 1) // 4))
        buffer = self._buffer[: self._rows]
        buffer.fill(-1)
        matchers = [(seq.guide.matcher, index) for index, seq in guided if seq.guide is not None]
        self._executor.unsafe_compute_mask_ptr(matchers, buffer.ctypes.data, buffer.strides[0], len(buffer))
        for index, seq in guided:
            if seq.guide is not None:
                seq.guide.finish_mask(buffer[index])
