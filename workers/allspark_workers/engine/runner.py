"""Run scheduled rows through the model and draw their next tokens."""

from __future__ import annotations

import torch
from allspark_kernels import plan_attention

from allspark_workers.engine.batch import RaggedBatch, build_batch
from allspark_workers.engine.device import check_health, use_device
from allspark_workers.engine.graphs import DecodeGraphs
from allspark_workers.engine.profiler import Profiler
from allspark_workers.engine.sampler import Sampler
from allspark_workers.engine.scheduler import Row, Scheduler
from allspark_workers.models.decoder import KVCache, StepTensors
from allspark_workers.models.loader import Model
from allspark_workers.models.ops import DIRECT, KernelOps, timed_ops


class Runner:
    """Holds what is on the device besides weights: KV cache, sampling state, captured decode steps."""

    def __init__(self, model: Model, cache: KVCache, scheduler: Scheduler, profiler: Profiler) -> None:
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._profiler = profiler
        self._timed = timed_ops(profiler.add, model.device)
        self._sampler = Sampler(model.arch.vocab_size, scheduler.max_batch, model.device)
        self._graphs: DecodeGraphs | None = None

    def capture(self, max_length: int) -> None:
        """Capture decode steps for requests of up to `max_length` tokens."""
        sched = self._scheduler
        with torch.inference_mode(), use_device(self._model.device):
            self._graphs = DecodeGraphs(
                self._model, self._cache, sched.max_batch, max_length, sched.span_size
            )

    def run(self, rows: list[Row], is_profiled: bool = False) -> list[int]:
        """Compute all rows in one forward pass; the next token of each row that samples, in order.

        A token of -1 means that the model gave no finite logit.
        """
        with torch.inference_mode(), use_device(self._model.device):
            return self._run(rows, is_profiled)

    def _run(self, rows: list[Row], is_profiled: bool) -> list[int]:
        with self._profiler.measure("reshape", "BuildBatch", is_profiled):
            batch = build_batch(rows, self._scheduler.span_table, self._scheduler.span_size)
        ops = self._timed if is_profiled else DIRECT
        if self._graphs is not None and not is_profiled and batch.is_decode:
            logits = self._graphs.run(batch)
        else:
            logits = self._forward(ops, batch, is_profiled)
        sequences = [row.sequence for row in rows if row.samples]
        if not sequences:
            return []
        return self._sampler.sample(ops, logits.float(), sequences)

    def forget(self, rows: list[Row]) -> None:
        """After a failed step: drop what it may have left half done.

        Raises torch.AcceleratorError if the device cannot be used any more.
        """
        check_health(self._model.device)
        self._sampler.forget([row.sequence for row in rows])

    def _forward(self, ops: KernelOps, batch: RaggedBatch, is_profiled: bool) -> torch.Tensor:
        model, arch = self._model, self._model.arch
        with self._profiler.measure("reshape", "PlanAttention", is_profiled):
            plan = plan_attention(
                batch.q_lens,
                batch.kv_lens,
                batch.span_table,
                self._scheduler.span_size,
                model.device,
                arch.num_heads,
                arch.num_kv_heads,
                arch.head_dim,
                batch.decode_lens,
            )
            tokens = torch.from_numpy(batch.tokens).to(model.device)
            ids, positions, slots = tokens.unbind(0)
            is_partial = len(batch.last) != tokens.shape[1]
            last = torch.from_numpy(batch.last).to(model.device) if is_partial else None
        return model.decoder.forward(ops, StepTensors(ids, positions, slots, plan, last), self._cache)
