"""Philox4x32-10 (Salmon et al., 2011) and the Gumbel noise drawn from it, as device functions."""

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds over uint32 counter words c0..c3 with the key (k0, k1)."""
    for _ in tl.static_range(10):
        first_high, second_high = tl.umulhi(c0, 0xD2511F53), tl.umulhi(c2, 0xCD9E8D57)
        first_low = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        second_low = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = second_high ^ c1 ^ k0, second_low, first_high ^ c3 ^ k1, first_low
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def negative_log_uniform(word):
    """-log(U) for U = ((word >> 8) + 0.5) * 2^-24, accurate at both ends in float32.

    From 1/2 on, U has no exact float32 form, but 1 - U has; there -log(1 - y) = 2 artanh(y / (2 - y)) is
    summed as a series in z^2 <= 1/9. Small values matter most: they are the winners of the race.
    """
    n = (word >> 8).to(tl.int32)
    is_upper = n >= (1 << 23)
    folded = tl.where(is_upper, (1 << 24) - 1 - n, n).to(tl.float32)
    y = (folded + 0.5) * (1.0 / (1 << 24))
    z = y / (2.0 - y)
    s = z * z
    series = 1.0 / 17.0
    series = series * s + 1.0 / 15.0
    series = series * s + 1.0 / 13.0
    series = series * s + 1.0 / 11.0
    series = series * s + 1.0 / 9.0
    series = series * s + 1.0 / 7.0
    series = series * s + 1.0 / 5.0
    series = series * s + 1.0 / 3.0
    series = series * s + 1.0
    return tl.where(is_upper, 2.0 * z * series, -tl.log(y))


@triton.jit
def gumbel(ids, seed, position):
    """Gumbel noise of token ``ids`` (int32 block) at ``position`` (int64) under ``seed`` (int64)."""
    c0 = ids.to(tl.uint32)
    zero = c0 ^ c0
    c1 = zero ^ (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero ^ ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = zero ^ (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = philox(c0, c1, c2, zero, k0, k1)
    return -tl.log(negative_log_uniform(word))
