"""Value types that cross the kernel boundary: packed weights and the sampling batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight matrix [out_features, in_features] in the layout of the implementation that packed it.

    ``dtype`` is the dtype of the weight as it was given; ``layout`` belongs to ``backend`` alone, and
    only that backend's ``linear`` may read it. ``nbytes`` counts what the layout (and bias) occupies.
    A layout that is no tensor has an attribute ``block``: the address of its ``nbytes`` bytes.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    backend: str
    layout: Any
    bias: torch.Tensor | None
    unpacker: Callable[["PackedLinear"], torch.Tensor]

    def unpack(self) -> torch.Tensor:
        """Return the weight [out_features, in_features] in ``dtype``, bit for bit as it was packed."""
        return self.unpacker(self)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """What ``sample`` needs for B rows; every tensor lies on the device of the logits.

    temperature [B] f32       0: greedy, the first maximum of the processed logits
    top_k [B] i32             0: the whole vocabulary
    top_p [B] f32             <= 0 or >= 1: off
    seed [B] i64, position [B] i64   key and counter of the draw; position = len(prompt) + len(generated)
    repetition_penalty, presence_penalty [B] f32; suppress_repetition [B] bool
    seen [S, V] u8            bit 0: id occurs in the prompt, bit 1: among the generated; None: no penalties
    slot [B] i32              row of ``seen`` of each batch row
    ban_rows, ban_ids [N] i64 pairs whose logit becomes -1e9 after the penalties
    allow_mask [B, ceil(V/32)] i32   bit i of word w allows id 32 * w + i; applied after the bans
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    suppress_repetition: torch.Tensor
    seen: torch.Tensor | None
    slot: torch.Tensor
    ban_rows: torch.Tensor
    ban_ids: torch.Tensor
    allow_mask: torch.Tensor | None = None
