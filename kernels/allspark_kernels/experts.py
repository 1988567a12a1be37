"""Value types of mixture-of-experts layers: packed experts, and which experts a step's tokens go to."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """Matrices [out_features, in_features] of ``num_experts`` experts, in the layout of one implementation.

    ``layout`` belongs to ``backend`` alone. ``nbytes`` counts what the layout occupies.
    """

    num_experts: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    backend: str
    layout: Any
    is_quantised: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts of T tokens: ids [T, k] int32, best first, and their weights [T, k] float32.

    ``state`` (tokens sorted by expert) belongs to the implementation that made it.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    state: Any = None
