"""Packed linear layer: against float64, exact unpacking, and rows that do not depend on the batch."""

import allspark_kernels as kernels
import pytest
import torch
from kernel_helpers import BF16, DTYPES, F16, F32, NAN, Place, assert_close, randn


def activation_dtype(place: Place, dtype: torch.dtype) -> torch.dtype:
    """On the CPU activations are float32 whatever the weights; the interpreter stands for CUDA."""
    return F32 if place.name == "torch" else dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), ((1, 16), (130, 64), (70, 1100)))
@pytest.mark.parametrize("has_bias", (False, True))
def test_matches_float64(
    place: Place, poisoned: None, n: int, k: int, dtype: torch.dtype, has_bias: bool
) -> None:
    weight = randn(n, k, seed=1, dtype=dtype, device=place.device) / k**0.5
    bias = randn(n, seed=2, dtype=dtype, device=place.device) if has_bias else None
    packed = kernels.pack_linear(weight, bias)
    assert (packed.in_features, packed.out_features, packed.dtype) == (k, n, dtype)
    assert torch.equal(packed.unpack(), weight)
    x = randn(5, k, seed=3, dtype=activation_dtype(place, dtype), device=place.device)
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert_close(kernels.linear(x, packed), expected, x.dtype, size=4 + k**0.5)


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
def test_rounded_inputs_match_float64(place: Place, poisoned: None, dtype: torch.dtype) -> None:
    weight = randn(70, 130, seed=1, dtype=dtype, device=place.device) / 130**0.5
    packed = kernels.pack_linear(weight, rounds_inputs=True)
    x = randn(5, 130, seed=3, dtype=activation_dtype(place, dtype), device=place.device)
    assert_close(kernels.linear(x, packed), x.to(dtype).double() @ weight.double().T, x.dtype, size=20)


def test_writes_into_out(place: Place) -> None:
    packed = kernels.pack_linear(randn(70, 48, seed=1, device=place.device))
    x = randn(3, 48, seed=2, device=place.device)
    out = torch.full((3, 70), NAN, device=place.device)
    assert kernels.linear(x, packed, out) is out
    assert torch.equal(out, kernels.linear(x, packed))


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
def test_rows_do_not_depend_on_the_batch(place: Place, dtype: torch.dtype) -> None:
    """One row, a few and many take different launches (parallel or sequential splits of K)."""
    if place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    packed = kernels.pack_linear(randn(24, 1100, seed=1, dtype=dtype, device=place.device))
    x = randn(135, 1100, seed=2, dtype=dtype, device=place.device)
    whole = kernels.linear(x, packed)
    for start, stop in ((134, 135), (10, 17), (30, 94), (20, 85)):
        part = kernels.linear(x[start:stop].contiguous(), packed)
        assert torch.equal(part, whole[start:stop]), f"rows {start}..{stop} differ"


def test_no_rows(place: Place) -> None:
    packed = kernels.pack_linear(randn(8, 16, seed=1, device=place.device))
    assert kernels.linear(torch.zeros(0, 16, device=place.device), packed).shape == (0, 8)
