"""Rotary embedding and KV write: against complex rotation in float64, and what must stay untouched."""

import allspark_kernels as kernels
import pytest
import torch
from kernel_helpers import BF16, DTYPES, F32, NAN, Place, assert_close, randn

SHAPES = ((2, 1, 16), (9, 3, 64), (8, 2, 80), (7, 1, 128))


def angles(rotary_dim: int, max_position: int) -> torch.Tensor:
    """Angle of each pair at each position, [max_position, rotary_dim / 2] in float64."""
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    return torch.arange(max_position).double()[:, None] * frequency


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Multiply the complex numbers x[i] + i x[i + R/2] by exp(i angle)."""
    x, half = x.double().cpu(), turn.shape[1]
    numbers = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = numbers * torch.exp(1j * turn)[:, None, :]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("span_size", (16, 128))
def test_rotates_and_writes(
    place: Place, heads: tuple[int, int, int], dtype: torch.dtype, span_size: int
) -> None:
    if place.name == "interpreter" and span_size == 128 and dtype != F32:
        pytest.skip("the interpreter is slow: it runs every head shape and dtype with one span size")
    num_q_heads, num_kv_heads, dim = heads
    rotary_dim = dim // 2 if dim == 80 else dim
    table = angles(rotary_dim, 600)
    cos_sin = torch.cat((table.cos(), table.sin()), 1).float().to(place.device)
    positions = torch.tensor([0, 1, 31, 32, 599, 7, 128])
    slots = torch.tensor([0, 3 * span_size - 1, -1, span_size, 2, -1, 2 * span_size + 5])
    fused = randn(7, (num_q_heads + 2 * num_kv_heads) * dim, seed=dim, dtype=dtype, device=place.device)
    before = fused.clone()
    q, k, v = (
        part.view(7, -1, dim)
        for part in fused.split([num_q_heads * dim, num_kv_heads * dim, num_kv_heads * dim], dim=1)
    )
    k_cache = torch.full((3, num_kv_heads, span_size, dim), NAN, dtype=dtype, device=place.device)
    v_cache = k_cache.clone()
    expected_q, expected_k = rotate(q, table[positions]), rotate(k, table[positions])
    kernels.rotary_kv_write(
        q, k, v, cos_sin, positions.to(place.device), slots.to(place.device), k_cache, v_cache
    )
    assert_close(q, expected_q, dtype)
    assert torch.equal(fused[:, num_q_heads * dim :], before[:, num_q_heads * dim :]), "k or v was changed"
    written = torch.zeros(3, span_size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            span, offset = divmod(slot, span_size)
            written[span, offset] = True
            assert_close(k_cache[span, :, offset], expected_k[token], dtype)
            assert torch.equal(v_cache[span, :, offset], v[token])
    for cache in (k_cache, v_cache):
        assert cache.transpose(1, 2)[~written].isnan().all(), "a slot that is nobody's was written"


def test_cache_may_be_narrower_than_activations(place: Place) -> None:
    q, k, v = (randn(3, heads, 32, seed=heads, device=place.device) for heads in (4, 2, 2))
    cos_sin = torch.cat((torch.ones(5, 16), torch.zeros(5, 16)), 1).to(place.device)
    positions = torch.arange(3, device=place.device)
    caches = [torch.full((1, 2, 16, 32), NAN, dtype=BF16, device=place.device) for _ in range(2)]
    kernels.rotary_kv_write(q, k, v, cos_sin, positions, positions, *caches)
    for cache, source in zip(caches, (k, v), strict=True):
        assert_close(cache[0, :, :3].transpose(0, 1), source, BF16)
        assert cache[0, :, 3:].isnan().all()
    assert q.dtype == F32
