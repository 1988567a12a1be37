"""Native norm, SwiGLU and rotary embedding against the oracle in float64, and bitwise per row."""

from collections.abc import Iterator

import pytest
import torch
from allspark_kernels import native, torch_ops

if not native.available():
    pytest.skip(str(native.unavailable_reason), allow_module_level=True)

from allspark_kernels.native import library

WIDTHS = (1, 15, 16, 64, 100, 576, 1537, 4096)
ROWS = (1, 2, 33, 128)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = native.get_num_threads()
    yield
    native.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, rows: int) -> None:
    x, weight = random(rows, width + 5)[:, :width], random(width)
    expected = torch_ops.rms_norm(x.double(), weight.double(), 1e-5)
    actual = native.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-7)
    assert actual.is_contiguous()
    assert torch.equal(native.rms_norm(x[rows - 1 :], weight, 1e-5), actual[rows - 1 :])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(width: int, rows: int) -> None:
    x, residual, weight = random(rows, width), random(rows, width, seed=1), random(width)
    total = x + residual
    actual = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(actual, native.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", (1, 17, 1536, 5000))
def test_gelu_mul(width: int, rows: int) -> None:
    gate_up = random(rows, 2 * width) * 3
    gate_up[0, 0] = -200.0
    expected = torch_ops.gelu_mul(gate_up.double())
    actual = native.gelu_mul(gate_up)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(native.gelu_mul(gate_up[rows - 1 :]), actual[rows - 1 :])


def test_soft_cap() -> None:
    x = random(7, 5003) * 40
    whole, expected, alone = x.clone(), x.double(), x[6:].clone()
    torch_ops.soft_cap(expected, 30.0)
    native.soft_cap(whole, 30.0)
    native.soft_cap(alone, 30.0)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-30)
    assert torch.equal(whole[6:], alone)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", (1, 17, 1536, 5000))
def test_silu_mul(width: int, rows: int) -> None:
    gate_up = random(rows, 2 * width) * 10
    gate_up[0, 0] = -200.0
    expected = torch_ops.silu_mul(gate_up.double())
    actual = native.silu_mul(gate_up)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-30)
    assert torch.equal(native.silu_mul(gate_up[rows - 1 :]), actual[rows - 1 :])


def test_silu_mul_keeps_nan() -> None:
    assert native.silu_mul(torch.tensor([[float("nan"), 1.0, 2.0, 3.0]])).isnan().tolist() == [[True, False]]


def rotary_case(
    tokens: int, dim: int, rotary_dim: int, dtype: torch.dtype, compute: torch.dtype
) -> tuple[torch.Tensor, ...]:
    q_heads, kv_heads, span_size = 6, 2, 16
    fused = random(tokens, (q_heads + 2 * kv_heads) * dim).to(compute)
    q, k, v = fused.split([q_heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    g = torch.Generator().manual_seed(tokens)
    positions = torch.randint(0, 500, (tokens,), generator=g)
    slots = torch.randperm(8 * max(16, tokens), generator=g)[:tokens]
    slots[tokens // 2 : tokens // 2 + 1] = -1
    shape = (max(16, tokens) // 2, kv_heads, span_size, dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"]
    angles = torch.arange(500)[:, None] / 100.0 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    shaped = (x.view(tokens, -1, dim) for x in (q, k, v))
    return *shaped, cos_sin, positions, slots, *caches


@pytest.mark.parametrize("tokens", (1, 3, 128))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("dim", "rotary_dim"), ((64, 64), (64, 20), (128, 128), (20, 20), (10, 6)))
def test_rotary_kv_write(dim: int, rotary_dim: int, dtype: torch.dtype, tokens: int) -> None:
    actual = rotary_case(tokens, dim, rotary_dim, dtype, torch.float32)
    native.rotary_kv_write(*actual)
    expected = rotary_case(tokens, dim, rotary_dim, torch.float64, torch.float64)
    torch_ops.rotary_kv_write(*expected)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-6, atol=1e-6)
    step = {torch.float32: 2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for a, b in zip(actual[6:], expected[6:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=step, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_cache_rounds_to_nearest_even_and_keeps_nan(dtype: torch.dtype) -> None:
    _, _, _, cos_sin, *_ = rotary_case(1, 64, 64, dtype, torch.float32)
    bits = torch.randint(-(2**31), 2**31 - 1, (40, 2, 64), generator=torch.Generator().manual_seed(5))
    v = bits.to(torch.int32).view(torch.float32).clone()
    v[v.abs() < 1e-37] = 0.0  # denormals are flushed
    halfway = torch.arange(64, dtype=torch.int32) * 0x8000 + 0x3F800000
    v[0, 0] = halfway.view(torch.float32)
    v[0, 1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    k_cache, v_cache = (torch.zeros(3, 2, 16, 64, dtype=dtype) for _ in "kv")
    zeros = torch.zeros(40, 2, 64)
    where = torch.arange(40)
    native.rotary_kv_write(zeros, zeros, v, cos_sin, where, where, k_cache, v_cache)
    stored = v_cache.transpose(1, 2).reshape(48, 2, 64)[:40]
    expected = v.to(dtype)
    assert torch.equal(stored.isnan(), expected.isnan())
    if dtype == torch.float16:  # results below its normal range are flushed too
        tiny = expected.abs() < torch.finfo(dtype).tiny
        stored, expected = stored.masked_fill(tiny, 0), expected.masked_fill(tiny, 0)
    assert torch.equal(stored.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(("table", "value"), ((4, -1), (4, 500), (5, 8 * 16)))
def test_rotary_refuses_what_lies_outside_its_tables(table: int, value: int) -> None:
    case = rotary_case(3, 64, 64, torch.bfloat16, torch.float32)
    before = case[0].clone()
    case[table][2] = value
    with pytest.raises(ValueError, match="outside"):
        native.rotary_kv_write(*case)
    assert torch.equal(case[0], before) and bool(case[6].isnan().all())


def test_threads_and_instruction_sets_agree() -> None:
    x, weight, gate_up = random(200, 576), random(576), random(200, 3072)
    native.set_num_threads(1)
    expected = native.rms_norm(x, weight, 1e-5), native.silu_mul(gate_up)
    rotary = rotary_case(200, 64, 64, torch.bfloat16, torch.float32)
    native.rotary_kv_write(*rotary)
    for isa in library.runnable_isas():
        with library.use_isa(isa):
            for count in (1, 2, 3):
                native.set_num_threads(count)
                assert torch.equal(native.rms_norm(x, weight, 1e-5), expected[0])
                assert torch.equal(native.silu_mul(gate_up), expected[1])
                again = rotary_case(200, 64, 64, torch.bfloat16, torch.float32)
                native.rotary_kv_write(*again)
                for a, b in zip(again, rotary, strict=True):
                    assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
