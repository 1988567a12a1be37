"""Operations of mixture-of-experts layers; the rules of ``api.py`` hold here too.

A layer of E experts, of which each token takes k (Shazeer et al., 2017):

    routing = route_experts(linear(x, router), k, is_normalised)
    parts = grouped_linear(silu_mul(...grouped_linear(x, gate_up, routing)...), down, routing)
    y = combine_experts(parts, routing)
"""

from collections.abc import Sequence

import torch

from .backend import ops_for, ops_named
from .experts import PackedExperts, Routing
from .quantised import QuantisedWeight, Weight
from .types import FLOAT_DTYPES


def pack_experts(weights: Sequence[Weight], *, rounds_inputs: bool = False) -> PackedExperts:
    """Lay out the experts' matrices [N, K], all of one shape and dtype, or all quantised in one format.

    ``rounds_inputs`` as in ``pack_linear``.
    """
    if not weights:
        raise ValueError("a mixture of experts needs at least one expert")
    forms = {_form(weight) for weight in weights}
    if len(forms) > 1:
        raise ValueError(f"experts must be alike, not {sorted(map(str, forms))}")
    first = weights[0]
    stored = first.codes if isinstance(first, QuantisedWeight) else first
    if stored.ndim != 2 or stored.dtype not in (*FLOAT_DTYPES, torch.int8) or 0 in stored.shape:
        raise ValueError(f"experts must be non-empty float matrices, not {stored.dtype} {list(stored.shape)}")
    return ops_for(stored.is_cuda).pack_experts(weights, rounds_inputs)


def _form(weight: Weight) -> tuple[object, ...]:
    if isinstance(weight, QuantisedWeight):
        has_offsets = weight.offsets is not None
        return (*_form(weight.codes), weight.bits, weight.group, weight.scales.dtype, has_offsets)
    return tuple(weight.shape), weight.dtype, weight.device


def route_experts(logits: torch.Tensor, top_k: int, is_normalised: bool) -> Routing:
    """The top_k experts of each token, by router logits [T, E] contiguous; ties: smaller id.

    An expert's weight is its softmax over all E in float32, divided by the sum over the chosen ones if
    ``is_normalised``.
    """
    if logits.ndim != 2 or not logits.is_contiguous() or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(
            f"router logits must be contiguous [T, E >= {top_k}], not {logits.dtype} {list(logits.shape)}"
        )
    return ops_for(logits.is_cuda).route_experts(logits, top_k, is_normalised)


def grouped_linear(x: torch.Tensor, w: PackedExperts, routing: Routing) -> torch.Tensor:
    """For each token t and choice j, x[t] (or x[t, j]) times its expert's matrix transposed: [T, k, N].

    x [T, K] or [T, k, K] contiguous, in the compute dtype; sums are kept in float32.
    """
    tokens, top_k = routing.ids.shape
    shapes = ((tokens, w.in_features), (tokens, top_k, w.in_features))
    if x.shape not in shapes or not x.is_contiguous():
        raise ValueError(f"x must be contiguous {shapes[0]} or {shapes[1]}, not {list(x.shape)}")
    if routing.num_experts != w.num_experts:
        raise ValueError(f"routing among {routing.num_experts} experts, but {w.num_experts} are packed")
    return ops_named(w.backend).grouped_linear(x, w, routing)


def combine_experts(
    parts: torch.Tensor,
    routing: Routing,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """parts [T, k, H] weighted and summed over k, plus sigmoid(shared_gate [T, 1]) * shared [T, H]: [T, H].

    ``shared`` None: no expert that every token takes; ``shared_gate`` None: it counts whole.
    """
    tokens, top_k = routing.ids.shape
    if parts.ndim != 3 or parts.shape[:2] != (tokens, top_k) or not parts.is_contiguous():
        raise ValueError(f"parts must be contiguous [{tokens}, {top_k}, H], not {list(parts.shape)}")
    for other, width in ((shared, parts.shape[2]), (shared_gate, 1)):
        if other is None:
            continue
        if other.shape != (tokens, width) or other.dtype is not parts.dtype or not other.is_contiguous():
            raise ValueError(f"shared must be {parts.dtype} [{tokens}, {width}], not {list(other.shape)}")
    if shared is None and shared_gate is not None:
        raise ValueError("shared_gate without shared")
    return ops_for(parts.is_cuda).combine_experts(parts, routing, shared, shared_gate)
