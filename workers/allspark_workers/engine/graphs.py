"""Captured decode steps: one per batch size bucket, replayed with new inputs instead of launched anew."""

from __future__ import annotations

import numpy as np
import torch
from allspark_kernels import AttentionPlan, GraphPool, backend_for, reserve_decode_plan

from allspark_workers.engine.batch import RaggedBatch
from allspark_workers.engine.device import Staging
from allspark_workers.models.decoder import KVCache, StepTensors
from allspark_workers.models.loader import Model
from allspark_workers.models.ops import DIRECT

_NOT_WRITTEN = -1


def is_worth_capturing(model: Model) -> bool:
    """Whether a step can be captured; the PyTorch fallback and the exchange between devices cannot."""
    return backend_for(model.device) != "torch" and model.decoder.exchange is None


def buckets(max_batch: int, is_padding_free: bool = False) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then every 8 up to 64, every 32 beyond; `max_batch` itself last.

    Where a replay skips the padding rows, `max_batch` alone serves every size.
    """
    if is_padding_free:
        return [max_batch]
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, max_batch + 32, 32)]
    return [size for size in sizes if size < max_batch] + [max_batch]


class DecodeGraph:
    """One decode step of up to `capacity` requests at fixed addresses; rows beyond the batch are padding."""

    def __init__(self, model: Model, cache: KVCache, plan: AttentionPlan, pool: GraphPool) -> None:
        """`plan`: a reserved one of its own; `pool`: where steps share memory that never run at once."""
        arch, device, capacity = model.arch, model.device, plan.capacity
        self.capacity = capacity
        self.plan = plan
        self._tokens = Staging((3, capacity), device)
        self._tokens.host[2] = _NOT_WRITTEN
        self._size = 0
        ids, positions, slots = self._tokens.tensor.unbind(0)
        self._decoder = model.decoder
        width, dtype = arch.hidden_size, model.decoder.compute_dtype
        self._residual = torch.zeros((capacity, width), dtype=dtype, device=device)
        self._logits: torch.Tensor | None = None
        inputs = StepTensors(ids, positions, slots, plan, None)

        def step() -> None:
            self._logits = self._decoder.blocks(DIRECT, self._residual, inputs, cache)

        self._tokens.upload()
        self._replay = pool.capture(step)

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [B, V] of a decode batch of at most `capacity` rows; valid until the next run."""
        size = batch.tokens.shape[1]
        self._tokens.wait()
        host = self._tokens.host
        host[:, :size] = batch.tokens
        if size < self._size:
            host[:2, size:] = 0
            host[2, size:] = _NOT_WRITTEN
        self._size = size
        self._tokens.upload()
        self._residual[:size] = self._decoder.embed(DIRECT, self._tokens.tensor[0, :size])
        self.plan.refill(batch.kv_lens.astype(np.int32), batch.span_table)
        self._replay()
        if self._logits is None:
            raise RuntimeError("the captured step produced no logits")
        return self._logits[:size]


class DecodeGraphs:
    """The captured steps of one model."""

    def __init__(self, model: Model, cache: KVCache, max_batch: int, max_length: int, span_size: int) -> None:
        arch, pool = model.arch, GraphPool(model.device)
        heads = (arch.num_heads, arch.num_kv_heads, arch.head_dim)
        graphs: list[DecodeGraph] = []
        # Largest first: the smaller ones then fit into the memory that it left behind.
        for size in sorted(buckets(max_batch, model.device.type == "cpu"), reverse=True):
            largest = graphs[0].plan if graphs else None
            plan = reserve_decode_plan(size, max_length, span_size, model.device, *heads, shared=largest)
            graphs.append(DecodeGraph(model, cache, plan, pool))
        self._graphs = graphs[::-1]

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Logits [B, V] through the smallest captured step that holds the batch."""
        size = len(batch.q_lens)
        return next(graph for graph in self._graphs if graph.capacity >= size).run(batch)
