"""Parts of a step that the rank which schedules has in common with those that follow it."""

from __future__ import annotations

import numpy as np
import torch
from allspark_kernels import plan_attention

from allspark_workers.engine.batch import RaggedBatch
from allspark_workers.models.decoder import StepTensors
from allspark_workers.models.loader import Model


def step_tensors(model: Model, span_size: int, batch: RaggedBatch) -> StepTensors:
    """The batch on the model's device, with its attention plan."""
    arch = model.arch
    plan = plan_attention(
        batch.q_lens,
        batch.kv_lens,
        batch.span_table,
        span_size,
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
    return StepTensors(ids, positions, slots, plan, last)


def last_of_rows(hidden: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
    """[B, H]: of states [T, H] those of each row's last token."""
    ends = torch.from_numpy(np.cumsum(batch.q_lens) - 1).to(hidden.device)
    return hidden.index_select(0, ends)
