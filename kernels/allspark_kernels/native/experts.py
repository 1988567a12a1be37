"""Mixture of experts on the CPU: tokens are sorted by expert, each expert multiplies its rows at once."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..experts import PackedExperts, Routing
from ..quantised import QuantisedWeight, Weight
from ..types import PackedLinear
from . import library
from .elementwise import _need_float32
from .quantised import pack_quantised
from .weights import pack_linear

MAX_EXPERTS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """The experts' matrices and the array of their addresses that the library reads."""

    experts: list[PackedLinear]
    addresses: "ctypes.Array[ctypes.c_void_p]"

    @property
    def address(self) -> int:
        """Where the array of addresses begins."""
        return ctypes.addressof(self.addresses)


@dataclass(frozen=True, slots=True, eq=False)
class SortedPairs:
    """Pairs (token, choice) by expert: order [T * k] int32, starts [E + 1] int32."""

    order: torch.Tensor
    starts: torch.Tensor


def pack_experts(weights: Sequence[Weight], rounds_inputs: bool) -> PackedExperts:
    """Every expert's [N, K] in panels. Raises ValueError for more experts than the library serves."""
    if len(weights) > MAX_EXPERTS:
        raise ValueError(f"native kernels serve up to {MAX_EXPERTS} experts, not {len(weights)}")
    experts = [
        pack_quantised(w, None) if isinstance(w, QuantisedWeight) else pack_linear(w, None, rounds_inputs)
        for w in weights
    ]
    first = experts[0]
    addresses = (ctypes.c_void_p * len(experts))(*(e.layout.address for e in experts))
    return PackedExperts(
        num_experts=len(experts),
        in_features=first.in_features,
        out_features=first.out_features,
        dtype=first.dtype,
        device=first.device,
        nbytes=sum(e.nbytes for e in experts),
        backend="native",
        layout=ExpertTable(experts, addresses),
        is_quantised=isinstance(weights[0], QuantisedWeight),
    )


def route_experts(logits: torch.Tensor, top_k: int, is_normalised: bool) -> Routing:
    """logits [T, E] float32 -> the top_k experts of each token."""
    _need_float32(logits)
    tokens, num_experts = logits.shape
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"native kernels serve up to {MAX_EXPERTS} experts, not {num_experts}")
    ids = torch.empty((tokens, top_k), dtype=torch.int32)
    weights = torch.empty((tokens, top_k), dtype=torch.float32)
    pairs = SortedPairs(
        torch.empty(tokens * top_k, dtype=torch.int32), torch.empty(num_experts + 1, dtype=torch.int32)
    )
    library.current.held.ask_route_experts(
        logits.data_ptr(),
        tokens,
        num_experts,
        top_k,
        int(is_normalised),
        ids.data_ptr(),
        weights.data_ptr(),
        pairs.order.data_ptr(),
        pairs.starts.data_ptr(),
    )
    return Routing(ids, weights, num_experts, pairs)


def grouped_linear(x: torch.Tensor, w: PackedExperts, routing: Routing) -> torch.Tensor:
    """x [T, K] or [T, k, K] float32 -> [T, k, N] float32; sums as in ``linear``."""
    _need_float32(x)
    tokens, top_k = routing.ids.shape
    table: ExpertTable = w.layout
    pairs: SortedPairs = routing.state
    rows = torch.empty((tokens * top_k, w.in_features), dtype=torch.float32)
    results = torch.empty((tokens * top_k, w.out_features), dtype=torch.float32)
    out = torch.empty((tokens, top_k, w.out_features), dtype=torch.float32)
    if library.current.freed.ask_grouped_linear(
        table.address,
        w.num_experts,
        pairs.order.data_ptr(),
        pairs.starts.data_ptr(),
        x.data_ptr(),
        int(x.ndim == 3),
        tokens,
        top_k,
        rows.data_ptr(),
        results.data_ptr(),
        out.data_ptr(),
        int(w.is_quantised),
    ):
        raise MemoryError(f"no memory for {tokens} rows of {w.in_features} activations")
    return out


def combine_experts(
    parts: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
) -> torch.Tensor:
    """parts [T, k, H] float32 -> [T, H] float32; experts are added best first, the shared one last."""
    _need_float32(parts)
    tokens, top_k, width = parts.shape
    out = torch.empty((tokens, width), dtype=torch.float32)
    library.current.held.ask_combine_experts(
        parts.data_ptr(),
        routing.weights.data_ptr(),
        None if shared is None else shared.data_ptr(),
        None if shared_gate is None else shared_gate.data_ptr(),
        out.data_ptr(),
        tokens,
        top_k,
        width,
    )
    return out
