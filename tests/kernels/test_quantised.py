"""Quantised weights: formats against their definition, products against the dequantised weight."""

import math

import allspark_kernels as kernels
import pytest
import torch
from allspark_kernels import QuantFormat, QuantisedWeight, native
from allspark_kernels.native import library
from kernel_helpers import BF16, F16, F32, NAN, UNITS, Place, assert_close, randn

FORMATS = (QuantFormat(8, 0), QuantFormat(8, 32), QuantFormat(4, 128), QuantFormat(4, 64), QuantFormat(4, 32))
SHAPES = ((70, 33), (32, 256), (5, 130))


def some_weight(n: int, k: int, form: QuantFormat, seed: int = 1) -> QuantisedWeight:
    return kernels.quantise(randn(n, k, seed=seed) / k**0.5, form)


def centred(n: int, k: int, seed: int = 2) -> QuantisedWeight:
    """4-bit codes around 8 with float16 scales, as GGUF has them."""
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    scales = (randn(n, math.ceil(k / 32), seed=seed) / 50).to(F16)
    return QuantisedWeight(codes, scales, None, 4, 32)


def with_offsets(n: int, k: int) -> QuantisedWeight:
    """8-bit codes with float32 scales and offsets of groups of 16."""
    codes = torch.randint(-128, 128, (n, k), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    groups = math.ceil(k / 16)
    return QuantisedWeight(codes, randn(n, groups, seed=4) / 500, randn(n, groups, seed=5) / 9, 8, 16)


def every_kind(n: int, k: int) -> list[QuantisedWeight]:
    return [*(some_weight(n, k, form) for form in FORMATS), centred(n, k), with_offsets(n, k)]


def moved(weight: QuantisedWeight, device: str) -> QuantisedWeight:
    offsets = None if weight.offsets is None else weight.offsets.to(device)
    return QuantisedWeight(
        weight.codes.to(device), weight.scales.to(device), offsets, weight.bits, weight.group
    )


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_value_is_off_by_half_a_step(shape: tuple[int, int], form: QuantFormat) -> None:
    weight = randn(*shape, seed=7) / 8
    weight[0] = 0.0
    weight[1, :3] = torch.tensor([3.0, -2.0, 1e-7])
    quantised = kernels.quantise(weight, form)
    group = form.group or shape[1]
    for first in range(0, shape[1], group):
        part = weight[:, first : first + group].double()
        error = (quantised.dequantise()[:, first : first + group].double() - part).abs().amax(1)
        low, high = part.amin(1), part.amax(1)
        size = torch.maximum(low.abs(), high.abs())
        step = size / 127 if form.bits == 8 else (high - low) / 15
        # Scale and offset are rounded to float16 (11 bits): up to 15 (127) times, and once.
        rounding = 2.0**-11 * 2 * size if form.group else 2.0**-22 * size
        assert (error <= step / 2 + rounding + 2.0**-14).all(), (first, error, step)


def test_bytes_per_weight(sampling_place: Place) -> None:
    """What stays in memory is the codes and their scales, nothing widened."""
    n, k = 256, 512
    for form, bits in zip(FORMATS, (8 + 32 / k, 8.5, 4.25, 4.5, 5.0), strict=True):
        packed = kernels.pack_quantised(moved(some_weight(n, k, form), sampling_place.device))
        if sampling_place.name == "torch" and form.bits == 4:
            bits += 4  # the oracle keeps a byte for every code
        assert packed.nbytes <= n * k * bits / 8 + 256, form


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("shape", ((70, 33), (130, 1100)), ids=str)
def test_products_equal_those_of_the_dequantised_weight(
    sampling_place: Place, poisoned: None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    n, k = shape
    if sampling_place.name in ("torch", "native") and dtype != F32:
        pytest.skip("activations on the CPU are float32")
    if sampling_place.name == "interpreter" and dtype == F32 and k > 1000:
        pytest.skip("the interpreter is slow: it runs the splits of K in one dtype")
    for index, weight in enumerate(every_kind(n, k)):
        if sampling_place.name == "interpreter" and k > 1000 and index % 3:
            continue
        bias = randn(n, seed=2, dtype=dtype, device=sampling_place.device) if index % 2 else None
        weight = moved(weight, sampling_place.device)
        packed = kernels.pack_quantised(weight, bias)
        wide = weight.dequantise()
        assert torch.equal(packed.unpack(), wide)
        x = randn(3, k, seed=3, dtype=dtype, device=sampling_place.device)
        y = kernels.linear(x, packed)
        assert y.dtype == dtype and not y.isnan().any()
        expected = x.double() @ wide.double().T + (0.0 if bias is None else bias.double())
        # Widened values are rounded to the dtype of x (truncated by the interpreter), sums to float32.
        unit = 2.0**-19 if dtype == F32 else 2.0**-7
        allowed = unit * (x.double().abs() @ wide.double().abs().T) + UNITS[dtype] * expected.abs()
        assert ((y.double() - expected).abs() <= allowed).all(), (weight.bits, weight.group)
        out = torch.full((3, n), NAN, dtype=dtype, device=sampling_place.device)
        assert torch.equal(kernels.linear(x, packed, out), y)


def test_rows_do_not_depend_on_the_batch(sampling_place: Place) -> None:
    if sampling_place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    for weight in (some_weight(40, 1100, FORMATS[0]), some_weight(40, 1100, FORMATS[4])):
        packed = kernels.pack_quantised(moved(weight, sampling_place.device))
        x = randn(80, 1100, seed=2, device=sampling_place.device)
        whole = kernels.linear(x, packed)
        for start, stop in ((79, 80), (10, 17), (10, 74)):
            part = kernels.linear(x[start:stop].contiguous(), packed)
            assert torch.equal(part, whole[start:stop]), f"rows {start}..{stop} differ"


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason))
@pytest.mark.parametrize("rows", (1, 2, 13, 200))
def test_native_products_are_those_of_float32_weights_bit_for_bit(rows: int) -> None:
    """Whether a weight is widened in the tile or beforehand cannot be told from the result."""
    before = native.get_num_threads()
    with kernels.use_backend("native"):
        for weight in every_kind(70, 259):
            bias, x = randn(70, seed=3), randn(rows, 259, seed=4)
            plain = kernels.linear(x, kernels.pack_linear(weight.dequantise(), bias))
            packed = kernels.pack_quantised(weight, bias)
            for isa in library.runnable_isas():
                with library.use_isa(isa):
                    for threads in (1, 3):
                        native.set_num_threads(threads)
                        assert torch.equal(kernels.linear(x, packed), plain), (weight.bits, isa, threads)
    native.set_num_threads(before)


@pytest.mark.parametrize("form", (FORMATS[0], FORMATS[3]), ids=str)
def test_quantised_experts(sampling_place: Place, poisoned: None, form: QuantFormat) -> None:
    weights = [moved(some_weight(45, 70, form, seed=e), sampling_place.device) for e in range(4)]
    packed = kernels.pack_experts(weights)
    routing = kernels.route_experts(randn(9, 4, seed=1, device=sampling_place.device), 2, True)
    x = randn(9, 70, seed=2, device=sampling_place.device)
    wide = torch.stack([weight.dequantise() for weight in weights]).double()
    expected = torch.einsum("tk,tjnk->tjn", x.double(), wide[routing.ids.long()])
    assert_close(kernels.grouped_linear(x, packed, routing), expected, F32, size=16.0)
    with pytest.raises(ValueError, match="must be alike"):
        kernels.pack_experts([weights[0], weights[1].dequantise()])


def test_stacking_changes_no_value() -> None:
    int8, int4, plain = with_offsets(6, 256), some_weight(5, 256, FORMATS[4]), some_weight(7, 256, FORMATS[1])
    for parts in (
        (int4, int4),
        (int8, plain),
        (int4, plain),
        (centred(4, 256), plain),
        (centred(4, 256), int8),
    ):
        stacked = kernels.stack_quantised(parts)
        assert torch.equal(stacked.dequantise(), torch.cat([part.dequantise() for part in parts]))
    same = kernels.stack_quantised((int4, int4))
    assert (same.bits, same.group, same.scales.dtype) == (4, 32, F16)
    order = torch.tensor([3, 1, 0, 2, 4, 5])
    assert torch.equal(int8.rows(order).dequantise(), int8.dequantise()[order])


def test_what_does_not_fit_is_refused() -> None:
    for form in ((5, 32), (4, -1)):
        with pytest.raises(ValueError, match="codes have 4 or 8 bits"):
            QuantFormat(*form)
    weight = some_weight(8, 64, FORMATS[4])
    with pytest.raises(ValueError, match="scales must be"):
        QuantisedWeight(weight.codes, weight.scales[:, :1], weight.offsets, 4, 32)
    with pytest.raises(ValueError, match=r"bias must be \[8\]"):
        kernels.pack_quantised(weight, torch.zeros(9))
