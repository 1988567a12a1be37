"""Mixture of experts (Shazeer et al., 2017): routing, the products of each token's experts, their sum."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from ..experts import PackedExperts, Routing
from ..quantised import QuantisedWeight, Weight
from ..types import PackedLinear
from .linear import linear, pack_linear, pack_quantised
from .precision import wide


def pack_experts(weights: Sequence[Weight], rounds_inputs: bool) -> PackedExperts:
    """Every expert's [N, K] as ``pack_linear`` keeps it."""
    layout = [
        pack_quantised(w, None) if isinstance(w, QuantisedWeight) else pack_linear(w, None, rounds_inputs)
        for w in weights
    ]
    first = layout[0]
    return PackedExperts(
        num_experts=len(layout),
        in_features=first.in_features,
        out_features=first.out_features,
        dtype=first.dtype,
        device=first.device,
        nbytes=sum(w.nbytes for w in layout),
        backend="torch",
        layout=layout,
        is_quantised=isinstance(weights[0], QuantisedWeight),
    )


def route_experts(logits: torch.Tensor, top_k: int, is_normalised: bool) -> Routing:
    """logits [T, E] -> the top_k experts of each token; ties: smaller id."""
    scores = torch.softmax(wide(logits), dim=-1)
    order = torch.sort(wide(logits), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, order)
    if is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(order.int(), weights, logits.shape[1])


def grouped_linear(x: torch.Tensor, w: PackedExperts, routing: Routing) -> torch.Tensor:
    """x [T, K] or [T, k, K] -> [T, k, N]: one product per expert that is in use."""
    tokens, top_k = routing.ids.shape
    rows = x.unsqueeze(1).expand(tokens, top_k, -1) if x.ndim == 2 else x
    out = torch.empty((tokens, top_k, w.out_features), dtype=x.dtype, device=x.device)
    experts: list[PackedLinear] = w.layout
    for expert in torch.unique(routing.ids).tolist():
        chosen = routing.ids == expert
        out[chosen] = linear(rows[chosen], experts[expert], None)
    return out


def combine_experts(
    parts: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
) -> torch.Tensor:
    """parts [T, k, H] times the weights, summed over k, plus sigmoid(shared_gate [T, 1]) * shared [T, H]."""
    total = (wide(parts) * routing.weights.unsqueeze(-1)).sum(1)
    if shared is not None:
        gate = 1.0 if shared_gate is None else functional.sigmoid(wide(shared_gate))
        total = total + gate * wide(shared)
    return total.to(parts.dtype)
