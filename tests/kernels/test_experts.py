"""Mixture of experts: routing, grouped products and their sum, against float64 formulas row by row."""

import allspark_kernels as kernels
import pytest
import torch
from kernel_helpers import BF16, F32, NAN, Place, assert_close, randn

E, K, N, TOP = 8, 70, 45, 3


def activation_dtype(place: Place, dtype: torch.dtype) -> torch.dtype:
    return F32 if place.name in ("torch", "native") else dtype


def make_layer(place: Place, dtype: torch.dtype) -> tuple[list[torch.Tensor], kernels.PackedExperts]:
    weights = [(randn(N, K, seed=50 + e) / K**0.5).to(dtype).to(place.device) for e in range(E)]
    packed = kernels.pack_experts(weights)
    assert (packed.num_experts, packed.in_features, packed.out_features) == (E, K, N)
    assert packed.nbytes >= E * N * K * dtype.itemsize
    return weights, packed


@pytest.mark.parametrize("is_normalised", (False, True))
def test_routing(sampling_place: Place, poisoned: None, is_normalised: bool) -> None:
    for rows, experts, top in ((1, 60, 4), (33, 128, 8), (5, 3, 3), (4, 17, 1)):
        logits = 3 * randn(rows, experts, seed=rows, device=sampling_place.device)
        routing = kernels.route_experts(logits, top, is_normalised)
        scores = logits.double().softmax(-1)
        best = scores.topk(top)
        assert torch.equal(routing.ids.long(), best.indices) and routing.ids.dtype == torch.int32
        total = best.values.sum(-1, keepdim=True) if is_normalised else 1.0
        assert_close(routing.weights, best.values / total, F32, size=1.0)


def test_equal_logits_rank_by_id_and_nan_ranks_last(sampling_place: Place) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0, 2.0], [NAN, 0.0, -1.0, 0.0, NAN]], device=sampling_place.device
    )
    if sampling_place.name == "torch":
        logits[1] = torch.tensor([-9.0, 0.0, -1.0, 0.0, -9.0])  # the oracle is not asked about NaN
    ids = kernels.route_experts(logits, 3, True).ids
    assert ids.tolist() == [[1, 2, 4], [1, 3, 2]]


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("tokens", (1, 7, 50))
def test_grouped_products(sampling_place: Place, poisoned: None, tokens: int, dtype: torch.dtype) -> None:
    if sampling_place.name == "interpreter" and tokens == 50 and dtype == F32:
        pytest.skip("the interpreter is slow: it runs the high tiles in one dtype")
    device, compute = sampling_place.device, activation_dtype(sampling_place, dtype)
    weights, packed = make_layer(sampling_place, dtype)
    logits = randn(tokens, E, seed=3, device=device)
    logits[:, 5] += 2.0  # one busy expert; with one token most are idle
    routing = kernels.route_experts(logits, TOP, True)
    wide = torch.stack(weights).double()
    x = randn(tokens, K, seed=4, dtype=compute, device=device)
    expected = torch.einsum("tk,tjnk->tjn", x.double(), wide[routing.ids.long()])
    assert_close(kernels.grouped_linear(x, packed, routing), expected, compute, size=16.0)
    own = randn(tokens, TOP, K, seed=5, dtype=compute, device=device)
    expected = torch.einsum("tjk,tjnk->tjn", own.double(), wide[routing.ids.long()])
    assert_close(kernels.grouped_linear(own, packed, routing), expected, compute, size=16.0)


@pytest.mark.parametrize("dtype", (F32, BF16))
def test_tokens_do_not_depend_on_their_neighbours(sampling_place: Place, dtype: torch.dtype) -> None:
    if sampling_place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    if sampling_place.name == "interpreter" and dtype == F32:
        pytest.skip("the interpreter is slow: it runs one dtype")
    device, compute = sampling_place.device, activation_dtype(sampling_place, dtype)
    _, packed = make_layer(sampling_place, dtype)
    logits, x = randn(50, E, seed=6, device=device), randn(50, K, seed=7, dtype=compute, device=device)
    shared, gate = randn(50, N, seed=8, dtype=compute, device=device), x[:, :1].contiguous()

    def layer(rows: slice) -> torch.Tensor:
        routing = kernels.route_experts(logits[rows].contiguous(), TOP, True)
        parts = kernels.grouped_linear(x[rows].contiguous(), packed, routing)
        return kernels.combine_experts(parts, routing, shared[rows].contiguous(), gate[rows].contiguous())

    whole = layer(slice(0, 50))
    for rows in (slice(0, 1), slice(41, 42), slice(10, 33), slice(30, 50)):
        assert torch.equal(layer(rows), whole[rows]), rows


def test_the_sum(sampling_place: Place, poisoned: None) -> None:
    device = sampling_place.device
    for tokens, width in ((1, 16), (5, 700)):
        routing = kernels.route_experts(randn(tokens, E, seed=9, device=device), TOP, False)
        parts = randn(tokens, TOP, width, seed=10, device=device)
        shared, gate = randn(tokens, width, seed=11, device=device), randn(tokens, 1, seed=12, device=device)
        routed = (parts.double() * routing.weights.double().unsqueeze(-1)).sum(1)
        assert_close(kernels.combine_experts(parts, routing), routed, F32)
        assert_close(kernels.combine_experts(parts, routing, shared), routed + shared.double(), F32)
        gated = routed + gate.double().sigmoid() * shared.double()
        assert_close(kernels.combine_experts(parts, routing, shared, gate), gated, F32)


def test_no_tokens(sampling_place: Place) -> None:
    _, packed = make_layer(sampling_place, F32)
    routing = kernels.route_experts(torch.zeros(0, E, device=sampling_place.device), TOP, True)
    parts = kernels.grouped_linear(torch.zeros(0, K, device=sampling_place.device), packed, routing)
    assert parts.shape == (0, TOP, N)
    assert kernels.combine_experts(parts, routing).shape == (0, N)


def test_what_does_not_fit_is_refused() -> None:
    packed = kernels.pack_experts([torch.ones(4, 8), torch.ones(4, 8)])
    routing = kernels.route_experts(torch.zeros(3, 2), 1, True)
    with pytest.raises(ValueError, match="at least one expert"):
        kernels.pack_experts([])
    with pytest.raises(ValueError, match="experts must be alike"):
        kernels.pack_experts([torch.ones(4, 8), torch.ones(4, 9)])
    with pytest.raises(ValueError, match="E >= 3"):
        kernels.route_experts(torch.zeros(3, 2), 3, True)
    with pytest.raises(ValueError, match=r"x must be contiguous \(3, 8\)"):
        kernels.grouped_linear(torch.zeros(3, 7), packed, routing)
    with pytest.raises(ValueError, match="among 5 experts"):
        kernels.grouped_linear(torch.zeros(3, 8), packed, kernels.route_experts(torch.zeros(3, 5), 1, True))
    with pytest.raises(ValueError, match="shared must be"):
        kernels.combine_experts(torch.zeros(3, 1, 4), routing, torch.zeros(3, 5))
