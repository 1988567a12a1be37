"""Philox4x32-10 against the published test vectors, and the noise made from it."""

import math

import pytest
import torch
import triton
import triton.language as tl
from allspark_kernels.torch_ops import philox as torch_philox
from allspark_kernels.triton_ops import philox as triton_philox
from kernel_helpers import Place, generator

# counter, key, result: kat_vectors of the Random123 library (philox4x32, 10 rounds).
VECTORS = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@triton.jit
def philox_kernel(counter_ptr, key_ptr, out_ptr):
    lane = tl.arange(0, 4)
    zero = tl.zeros((4,), tl.uint32)
    c0 = zero + tl.load(counter_ptr).to(tl.uint32)
    c1 = zero + tl.load(counter_ptr + 1).to(tl.uint32)
    c2 = zero + tl.load(counter_ptr + 2).to(tl.uint32)
    c3 = zero + tl.load(counter_ptr + 3).to(tl.uint32)
    k0 = zero + tl.load(key_ptr).to(tl.uint32)
    k1 = zero + tl.load(key_ptr + 1).to(tl.uint32)
    r0, r1, r2, r3 = triton_philox.philox(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + lane, r0.to(tl.int64))
    tl.store(out_ptr + 4 + lane, r1.to(tl.int64))
    tl.store(out_ptr + 8 + lane, r2.to(tl.int64))
    tl.store(out_ptr + 12 + lane, r3.to(tl.int64))


@triton.jit
def noise_kernel(word_ptr, out_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word = tl.load(word_ptr + lane, mask=lane < n, other=0).to(tl.uint32)
    tl.store(out_ptr + lane, triton_philox.negative_log_uniform(word), mask=lane < n)


@triton.jit
def gumbel_kernel(seed_ptr, position_ptr, out_ptr, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)
    tl.store(out_ptr + ids, triton_philox.gumbel(ids, tl.load(seed_ptr), tl.load(position_ptr)))


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_known_answers(place: Place, counter: str, key: str, result: str) -> None:
    count, keys = (torch.tensor(words(text), device=place.device) for text in (counter, key))
    if place.name == "torch":
        c0, c1, c2, c3 = count
        found = [int(word) for word in torch_philox.philox((c0, c1, c2, c3), (keys[0], keys[1]))]
    else:
        out = torch.zeros(4, 4, dtype=torch.int64, device=place.device)
        philox_kernel[(1,)](count, keys, out)
        found = out[:, 0].tolist()
    assert [f"{word:08x}" for word in found] == result.split()


def test_noise_is_accurate_and_finite_at_both_ends(place: Place) -> None:
    """-log U to float32 accuracy, also where U is next to 0 or next to 1 (there it decides races)."""
    if place.name == "torch":
        pytest.skip("the oracle computes in float64")
    middle = torch.randint(0, 2**32, (1000,), generator=generator(3))
    edges = [0, 255, 256, 2**31 - 1, 2**31, 2**31 + 256, 2**32 - 512, 2**32 - 257, 2**32 - 256, 2**32 - 1]
    word = torch.cat((torch.tensor(edges), middle)).to(place.device)
    out = torch.full((len(word),), math.nan, device=place.device)
    noise_kernel[(1,)](word, out, len(word), BLOCK=1024)
    expected = -torch.log(((word >> 8).double() + 0.5) * 2.0**-24)
    assert out.isfinite().all() and (out > 0).all()
    assert ((out.double() - expected).abs() / expected).max() < 1e-6


@pytest.mark.parametrize("seed", (0, 1, -1, 2**62 + 12345))
@pytest.mark.parametrize("position", (0, 77, 2**33 + 5))
def test_both_implementations_draw_the_same_noise(place: Place, seed: int, position: int) -> None:
    if place.name == "torch":
        pytest.skip("compares with the oracle itself")
    keys = [torch.tensor([value], device=place.device) for value in (seed, position)]
    out = torch.full((64,), math.nan, device=place.device)
    gumbel_kernel[(1,)](*keys, out, BLOCK=64)
    expected = torch_philox.gumbel(torch.arange(64), torch.tensor(seed), torch.tensor(position))
    assert torch.allclose(out.double().cpu(), expected, atol=1e-5)


def test_noise_has_the_gumbel_distribution() -> None:
    """Mean gamma, variance pi^2 / 6, and no correlation between neighbouring ids, positions, seeds."""
    ids = torch.arange(200_000)
    noise = torch_philox.gumbel(ids, torch.tensor(5), torch.tensor(9))
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    others = (
        torch_philox.gumbel(ids + 1, torch.tensor(5), torch.tensor(9)),
        torch_philox.gumbel(ids, torch.tensor(6), torch.tensor(9)),
        torch_philox.gumbel(ids, torch.tensor(5), torch.tensor(10)),
    )
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack((noise, other)))[0, 1])) < 0.01
