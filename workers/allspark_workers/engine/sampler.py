"""Sampling settings of a batch as tensors, and the bitmask of tokens that penalties need."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Final

import torch
from allspark_kernels import SamplingBatch, mark_seen, sample

from allspark_workers.engine.device import upload
from allspark_workers.engine.sequence import Sequence
from allspark_workers.models.ops import KernelOps

_IN_PROMPT = 1
_GENERATED = 2
_NEUTRAL: Final = {
    "temperature": (1.0, torch.float32),
    "top_k": (0, torch.int32),
    "top_p": (0.0, torch.float32),
    "seed": (0, torch.int64),
    "position": (0, torch.int64),
    "repetition_penalty": (1.0, torch.float32),
    "presence_penalty": (0.0, torch.float32),
    "suppress_repetition": (False, torch.bool),
    "slot": (0, torch.int32),
}


class Sampler:
    """Draws one token per sequence; keeps the tensors of an unchanged batch from step to step.

    `seen` [max_batch, vocab_size] uint8 is allocated at the first request with a penalty; a sequence uses the
    row of its batch slot, filled from its tokens when it enters the slot and kept up to date afterwards.
    """

    def __init__(self, vocab_size: int, max_batch: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_batch = max_batch
        self._device = device
        self._seen: torch.Tensor | None = None
        self._sequences: list[Sequence] = []
        self._rows: list[int] = []
        self._batch: SamplingBatch | None = None
        self._penalised: list[int] = []
        self._penalised_rows = self._penalised_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._empty = torch.empty(0, dtype=torch.int64, device=device)

    def sample(
        self,
        ops: KernelOps,
        logits: torch.Tensor,
        sequences: list[Sequence],
        allow_mask: torch.Tensor | None = None,
    ) -> list[int]:
        """Next token of each sequence from logits [B, V] float32 (modified in place); -1 if none is left.

        `allow_mask` as in SamplingBatch; None: every token is allowed.
        """
        batch = self._settings(sequences)
        self._mark_history(sequences)
        ban_rows, ban_ids = self._bans(sequences)
        position = self._tensor([s.length for s in sequences], torch.int64)
        batch = replace(batch, position=position, ban_rows=ban_rows, ban_ids=ban_ids, seen=self._seen_rows())
        if allow_mask is not None:
            batch = replace(batch, allow_mask=allow_mask)
        drawn = ops.sample(logits, batch)
        if self._penalised and self._seen is not None:
            mark_seen(self._seen, self._penalised_slots, drawn[self._penalised_rows], _GENERATED)
        tokens: list[int] = drawn.tolist()
        return tokens

    def try_out(self) -> None:
        """Draw with and without penalties, bans and masks, for nobody."""
        size = self._vocab_size
        one = {name: self._tensor([value], dtype) for name, (value, dtype) in _NEUTRAL.items()}
        some = self._tensor([0], torch.int64)
        seen = torch.zeros((1, size), dtype=torch.uint8, device=self._device)
        masks = (None, torch.full((1, (size + 31) // 32), -1, dtype=torch.int32, device=self._device))
        for mask, bans, table in itertools.product(masks, (some, self._empty), (seen, None)):
            batch = SamplingBatch(**one, seen=table, ban_rows=bans, ban_ids=bans, allow_mask=mask)
            sample(torch.zeros((1, size), dtype=torch.float32, device=self._device), batch)

    def forget(self, sequences: list[Sequence]) -> None:
        """After a failed step: what was marked may not match the tokens, so mark again."""
        self._sequences = []
        for seq in sequences:
            seq.is_marked = False

    def _settings(self, sequences: list[Sequence]) -> SamplingBatch:
        """Tensors that stay the same while the same sequences decode in the same slots."""
        rows = [s.row for s in sequences]
        if self._batch is not None and sequences == self._sequences and rows == self._rows:
            return self._batch
        self._penalised = [i for i, s in enumerate(sequences) if s.uses_penalties]
        if self._penalised:
            self._penalised_rows = self._tensor(self._penalised, torch.int64)
            self._penalised_slots = self._tensor([rows[i] for i in self._penalised], torch.int64)
        columns = zip(*(s.sampling for s in sequences), strict=True)
        temperature, top_k, top_p, seed, repetition, presence, suppress = columns
        size = self._vocab_size
        self._batch = SamplingBatch(
            temperature=self._tensor(temperature, torch.float32),
            top_k=self._tensor([min(k, size) for k in top_k], torch.int32),
            top_p=self._tensor(top_p, torch.float32),
            seed=self._tensor(seed, torch.int64),
            position=self._empty,
            repetition_penalty=self._tensor(repetition, torch.float32),
            presence_penalty=self._tensor(presence, torch.float32),
            suppress_repetition=self._tensor(suppress, torch.bool),
            seen=None,
            slot=self._tensor(rows, torch.int32),
            ban_rows=self._empty,
            ban_ids=self._empty,
        )
        self._sequences, self._rows = list(sequences), rows
        return self._batch

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return upload(values, dtype, self._device)

    def _bans(self, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        rows: list[int] = []
        ids: list[int] = []
        for index, seq in enumerate(sequences):
            if seq.constraints.may_ban:
                banned = seq.constraints.banned(seq)
                rows += [index] * len(banned)
                ids += banned
        if not rows:
            return self._empty, self._empty
        return self._tensor(rows, torch.int64), self._tensor(ids, torch.int64)

    def _seen_rows(self) -> torch.Tensor | None:
        return self._seen if self._penalised else None

    def _mark_history(self, sequences: list[Sequence]) -> None:
        """Fill the bitmask row of each penalised sequence that is new in its slot."""
        for index in self._penalised:
            seq = sequences[index]
            if seq.is_marked:
                continue
            if self._seen is None:
                shape = (self._max_batch, self._vocab_size)
                self._seen = torch.zeros(shape, dtype=torch.uint8, device=self._device)
            self._seen[seq.row].zero_()
            known = self._tensor(seq.tokens[: seq.length], torch.int64)
            mark_seen(self._seen, seq.row, known[: seq.num_prompt], _IN_PROMPT)
            mark_seen(self._seen, seq.row, known[seq.num_prompt :], _GENERATED)
            seq.is_marked = True
