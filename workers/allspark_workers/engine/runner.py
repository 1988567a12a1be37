"""Run scheduled rows through the model and draw their next tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from allspark_kernels import NO_ADAPTER, LoraTable

from allspark_workers.engine.adapted import AdaptedLinears
from allspark_workers.engine.batch import RaggedBatch, build_batch
from allspark_workers.engine.beam_candidates import beam_candidates
from allspark_workers.engine.beams import Candidates
from allspark_workers.engine.device import check_health, use_device
from allspark_workers.engine.embeddings import GivenEmbeddings, given_embeddings, replace_embeddings
from allspark_workers.engine.forward import last_of_rows, step_tensors
from allspark_workers.engine.graphs import DecodeGraphs
from allspark_workers.engine.inference import HiddenStates
from allspark_workers.engine.kv import copy_spans
from allspark_workers.engine.masks import Masks
from allspark_workers.engine.profiler import Profiler
from allspark_workers.engine.sampler import Sampler
from allspark_workers.engine.scheduler import Scheduler
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.step_plan import Row
from allspark_workers.models.decoder import KVCache, StepTensors
from allspark_workers.models.loader import Model
from allspark_workers.models.ops import DIRECT, KernelOps, timed_ops

if TYPE_CHECKING:
    from allspark_workers.parallel.leader import Leader

Result = int | Candidates | HiddenStates | None


class Runner:
    """Holds what is on the device besides weights: KV cache, sampling state, captured decode steps."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        scheduler: Scheduler,
        profiler: Profiler,
        adapters: LoraTable | None = None,
        leader: Leader | None = None,
    ) -> None:
        self._leader = leader
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._profiler = profiler
        self._timed = timed_ops(profiler.add, model.device)
        self._sampler = Sampler(model.arch.vocab_size, scheduler.max_batch, model.device)
        self._masks = Masks(model.arch.vocab_size, scheduler.max_batch, model.device)
        self._graphs: DecodeGraphs | None = None
        self._adapted = AdaptedLinears(model.decoder, adapters) if adapters is not None else None

    def capture(self, max_length: int) -> None:
        """Capture decode steps for requests of up to `max_length` tokens."""
        sched = self._scheduler
        with torch.inference_mode(), use_device(self._model.device):
            self._graphs = DecodeGraphs(
                self._model, self._cache, sched.max_batch, max_length, sched.span_size
            )

    def try_sampling(self) -> None:
        """Draw in every way that requests may ask for: a GPU compiles kernels at their first use."""
        with torch.inference_mode(), use_device(self._model.device):
            self._sampler.try_out()

    def copy_spans(self, copies: dict[int, int]) -> None:
        """Give each span (key) the content of another one (value)."""
        with torch.inference_mode(), use_device(self._model.device):
            if self._leader is not None:
                self._leader.copy_spans(copies)
            copy_spans(self._cache, copies)

    def run(self, rows: list[Row], is_profiled: bool = False) -> list[Result]:
        """Compute all rows in one forward pass; the result of each row that samples, in order.

        That is the next token, or candidates of a beam, or what ModelInference wants of a chunk. A token of
        -1 or candidates of None mean that the model gave no finite logit.
        """
        with torch.inference_mode(), use_device(self._model.device):
            if any(row.sequence.is_inference for row in rows):
                return self._run_apart(rows, is_profiled)
            return self._run(rows, is_profiled)

    def _run_apart(self, rows: list[Row], is_profiled: bool) -> list[Result]:
        """Two passes: one keeps the states of all its tokens, the other those it samples after."""
        usual = [row for row in rows if not row.sequence.is_inference]
        drawn = iter(self._run(usual, is_profiled) if usual else [])
        states = iter(self._infer([row for row in rows if row.sequence.is_inference], is_profiled))
        return [next(states if row.sequence.is_inference else drawn) for row in rows if row.samples]

    def _infer(self, rows: list[Row], is_profiled: bool) -> list[HiddenStates]:
        batch = build_batch(rows, self._scheduler.span_table, self._scheduler.span_size)
        batch = replace(batch, last=np.arange(batch.tokens.shape[1]))
        ops = self._timed if is_profiled else DIRECT
        given, slots = given_embeddings(rows), self._adapter_slots(rows)
        ops = self._with_adapters(ops, slots, batch) or ops
        if self._leader is not None:
            self._leader.infer(batch, given, slots)
        decoder, step = self._model.decoder, self._step(batch, is_profiled)
        residual = replace_embeddings(decoder.embed(ops, step.ids), given)
        hidden = decoder.hidden(ops, residual, step, self._cache)
        logits = decoder.logits(ops, last_of_rows(hidden, batch)).float().cpu().numpy()
        parts = np.split(hidden.float().cpu().numpy(), np.cumsum(batch.q_lens)[:-1])
        return [HiddenStates(part, row) for part, row in zip(parts, logits, strict=True)]

    def _run(self, rows: list[Row], is_profiled: bool) -> list[Result]:
        with self._profiler.measure("reshape", "BuildBatch", is_profiled):
            batch = build_batch(rows, self._scheduler.span_table, self._scheduler.span_size)
        given, slots = given_embeddings(rows), self._adapter_slots(rows)
        if self._leader is not None:
            self._leader.step(batch, given, slots)
        ops = self._timed if is_profiled else DIRECT
        adapted = self._with_adapters(ops, slots, batch)
        sequences = [row.sequence for row in rows if row.samples]
        self._masks.begin(sequences)  # while the model computes
        if adapted is None and self._graphs is not None and not is_profiled and batch.is_decode:
            logits = self._graphs.run(batch)
        elif given:
            logits = self._forward_given(adapted or ops, batch, is_profiled, given)
        else:
            logits = self._forward(adapted or ops, batch, is_profiled)
        if not sequences:
            return []
        return self._select(ops, logits.float(), sequences)

    def _adapter_slots(self, rows: list[Row]) -> list[int]:
        """The slot of each row's adapter; empty if no row has one."""
        leases = [row.sequence.request.adapter for row in rows]
        if not any(leases):
            return []
        return [NO_ADAPTER if lease is None else lease.slot for lease in leases]

    def _with_adapters(self, ops: KernelOps, slots: list[int], batch: RaggedBatch) -> KernelOps | None:
        """The operations with the rows' adapters; None if there are none.

        Captured steps know no adapters: a batch with one runs call by call, with the same bits.
        """
        if self._adapted is None or not slots:
            return None
        return self._adapted.ops(ops, slots, batch.q_lens, batch.last)

    def _select(self, ops: KernelOps, logits: torch.Tensor, sequences: list[Sequence]) -> list[Result]:
        is_beam = [seq.gang is not None for seq in sequences]
        masks = self._masks.take()
        if not any(is_beam):
            return [*self._sampler.sample(ops, logits, sequences, masks)]
        beams = [i for i, yes in enumerate(is_beam) if yes]
        others = [i for i, yes in enumerate(is_beam) if not yes]
        results: dict[int, Result] = {}
        found = beam_candidates(logits[beams], [sequences[i] for i in beams])
        results.update(zip(beams, found, strict=True))
        if others:
            allowed = None if masks is None else masks[others]
            drawn = self._sampler.sample(ops, logits[others], [sequences[i] for i in others], allowed)
            results.update(zip(others, drawn, strict=True))
        return [results[i] for i in range(len(sequences))]

    def forget(self, rows: list[Row]) -> None:
        """After a failed step: drop what it may have left half done.

        Raises torch.AcceleratorError if the device cannot be used any more.
        """
        check_health(self._model.device)
        self._masks.drop()
        self._sampler.forget([row.sequence for row in rows])

    def _forward(self, ops: KernelOps, batch: RaggedBatch, is_profiled: bool) -> torch.Tensor:
        return self._model.decoder.forward(ops, self._step(batch, is_profiled), self._cache)

    def _forward_given(
        self, ops: KernelOps, batch: RaggedBatch, is_profiled: bool, given: GivenEmbeddings
    ) -> torch.Tensor:
        decoder, step = self._model.decoder, self._step(batch, is_profiled)
        residual = replace_embeddings(decoder.embed(ops, step.ids), given)
        return decoder.blocks(ops, residual, step, self._cache)

    def _step(self, batch: RaggedBatch, is_profiled: bool) -> StepTensors:
        with self._profiler.measure("reshape", "PlanAttention", is_profiled):
            return step_tensors(self._model, self._scheduler.span_size, batch)
