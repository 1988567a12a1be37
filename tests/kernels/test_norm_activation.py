"""RMSNorm, with and without residual, and SwiGLU, against formulas in float64."""

import math

import allspark_kernels as kernels
import pytest
import torch
from kernel_helpers import DTYPES, NAN, Place, assert_close, randn

WIDTHS = (16, 64, 100, 576, 2048)


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), (x.shape[1],), weight.double(), eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(place: Place, poisoned: None, width: int, dtype: torch.dtype) -> None:
    for rows in (1, 5, 33):
        x = randn(rows, width, seed=rows, dtype=dtype, device=place.device)
        weight = randn(width, seed=width, dtype=dtype, device=place.device)
        y = kernels.rms_norm(x, weight, 1e-5)
        assert y.dtype == dtype and y.is_contiguous()
        assert_close(y, norm_reference(x, weight, 1e-5), dtype)


def test_rms_norm_of_strided_rows(place: Place, poisoned: None) -> None:
    fused = torch.full((7, 200), NAN, device=place.device)
    fused[:, 40:140] = randn(7, 100, seed=1, device=place.device)
    weight = randn(100, seed=2, device=place.device)
    view = fused[:, 40:140]
    y = kernels.rms_norm(view, weight, 1e-6)
    assert y.is_contiguous()
    assert_close(y, norm_reference(view, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_updates_the_residual(
    place: Place, poisoned: None, width: int, dtype: torch.dtype
) -> None:
    x = randn(9, width, seed=3, dtype=dtype, device=place.device)
    residual = randn(9, width, seed=4, dtype=dtype, device=place.device)
    weight = randn(width, seed=5, dtype=dtype, device=place.device)
    total = x.double() + residual.double()
    y = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, total, dtype)
    # The norm is taken of the residual as it was stored.
    assert_close(y, norm_reference(residual, weight, 1e-5), dtype)


@pytest.mark.parametrize("width", (64, 576))
def test_rows_of_a_norm_do_not_depend_on_the_batch(place: Place, width: int) -> None:
    x = randn(40, width, seed=6, device=place.device)
    weight = randn(width, seed=7, device=place.device)
    alone = torch.cat([kernels.rms_norm(x[i : i + 1], weight, 1e-5) for i in range(40)])
    assert torch.equal(alone, kernels.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (1, 16, 100, 1500))
def test_silu_mul(place: Place, poisoned: None, width: int, dtype: torch.dtype) -> None:
    for rows in (1, 6):
        gate_up = 4 * randn(rows, 2 * width, seed=rows + width, dtype=dtype, device=place.device)
        gate, up = gate_up.double().split(width, dim=1)
        y = kernels.silu_mul(gate_up)
        assert y.shape == (rows, width) and y.dtype == dtype
        assert_close(y, gate / (1 + torch.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", (16, 100, 1500))
def test_gelu_mul(place: Place, poisoned: None, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * randn(5, 2 * width, seed=width, dtype=dtype, device=place.device)
    gate, up = gate_up.double().split(width, dim=1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    y = kernels.gelu_mul(gate_up)
    assert y.shape == (5, width) and y.dtype == dtype
    assert_close(y, 0.5 * gate * (1 + torch.tanh(inner)) * up, dtype, size=64.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(place: Place, dtype: torch.dtype) -> None:
    x = 40 * randn(3, 1100, seed=1, dtype=dtype, device=place.device)
    expected = 30.0 * torch.tanh(x.double() / 30.0)
    kernels.soft_cap(x, 30.0)
    assert_close(x, expected, dtype, size=64.0)


def test_no_rows(place: Place) -> None:
    weight = randn(32, seed=1, device=place.device)
    empty = torch.zeros(0, 32, device=place.device)
    assert kernels.rms_norm(empty, weight, 1e-5).shape == (0, 32)
    assert kernels.silu_mul(empty).shape == (0, 16)
