"""Native linear layer: against float64, and bit for bit whatever the rows, threads and instruction set."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from allspark_kernels import PackedLinear, native

if not native.available():
    pytest.skip(str(native.unavailable_reason), allow_module_level=True)

from allspark_kernels.native import library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (5, 3), (32, 64), (33, 17), (31, 129), (100, 300), (960, 576), (70, 4200))
ROWS = (1, 2, 7, 8, 12, 13, 16, 33, 128)


@pytest.fixture
def threads() -> Iterator[None]:
    before = native.get_num_threads()
    yield
    native.set_num_threads(before)


def problem(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 7919 + k * 31 + rows)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    return torch.randn(rows, k, generator=generator), weight, bias


def run(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    out = torch.full((len(x), packed.out_features), float("nan"))
    assert native.linear(x, packed, out) is out
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_float64(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = problem(n, k, 27, dtype)
    for kept_bias in (None, bias):
        packed = native.pack_linear(weight, kept_bias, False)
        expected = x.double() @ weight.double().T
        if kept_bias is not None:
            expected += kept_bias.double()
        bound = (x.double().abs() @ weight.double().abs().T) * k * 2.0**-24 + 1e-6
        assert ((run(x, packed) - expected).abs() <= bound).all()
        assert torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rounded_inputs_match_float64(n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = problem(n, k, 27, dtype)
    rounded, packed = x.to(dtype).double(), native.pack_linear(weight, bias, True)
    bound = (rounded.abs() @ weight.double().abs().T) * k * 2.0**-24 + 1e-6
    assert ((run(x, packed) - (rounded @ weight.double().T + bias.double())).abs() <= bound).all()
    assert torch.equal(packed.unpack(), weight)


@pytest.mark.parametrize("rounds", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_do_not_depend_on_the_batch(n: int, k: int, dtype: torch.dtype, rounds: bool) -> None:
    x, weight, bias = problem(n, k, 300, dtype)
    packed = native.pack_linear(weight, bias, rounds)
    whole = run(x, packed)
    for rows in ROWS:
        assert torch.equal(run(x[:rows], packed), whole[:rows]), rows
        assert torch.equal(run(x[300 - rows :], packed), whole[300 - rows :]), rows


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rounds", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_instruction_sets_agree(dtype: torch.dtype, rounds: bool) -> None:
    """Rounded inputs: also where the CPU has no instruction for pairs of bf16."""
    x, weight, bias = problem(330, 577, 40, dtype)
    x *= torch.logspace(-37, 3, 40)[:, None]  # sums that are flushed to zero, too
    packed = native.pack_linear(weight, bias, rounds)
    native.set_num_threads(1)
    expected = {rows: run(x[:rows], packed) for rows in ROWS}
    for isa in library.runnable_isas():
        with library.use_isa(isa):
            for count in (1, 2, 3):
                native.set_num_threads(count)
                for rows in ROWS:
                    assert torch.equal(run(x[:rows], packed), expected[rows]), (isa, count, rows)


def test_no_rows_give_no_rows() -> None:
    _, weight, _ = problem(33, 17, 1, torch.bfloat16)
    assert native.linear(torch.empty(0, 17), native.pack_linear(weight, None, False), None).shape == (0, 33)


def test_activations_must_be_float32() -> None:
    x, weight, _ = problem(33, 17, 2, torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        native.linear(x.bfloat16(), native.pack_linear(weight, None, False), None)


def test_denormals_are_flushed_and_the_callers_mode_is_kept() -> None:
    tiny = torch.full((1, 8), 1e-40)
    packed = native.pack_linear(torch.eye(8), None, False)
    assert torch.equal(run(tiny, packed), torch.zeros(1, 8))
    assert float(torch.tensor(1e-40) * 1.0) != 0.0


def test_memory_of_dropped_weights_is_reused() -> None:
    held = native.pack_linear(torch.randn(64, 64), None, False)
    before = held.unpack()
    weight = torch.zeros(2048, 1024)
    native.pack_linear(weight, None, False)
    resident = resident_bytes()
    for _ in range(40):
        native.pack_linear(weight, None, False)
    assert resident_bytes() - resident < 20 * weight.nbytes
    assert torch.equal(held.unpack(), before)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
