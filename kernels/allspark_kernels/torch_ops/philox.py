"""Philox4x32-10, a counter-based generator (Salmon et al., 2011)."""

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four 32-bit words (as int64 tensors) from a 128-bit counter and a 64-bit key, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2^64, which leaves both 32-bit halves intact.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & LOW) ^ c1 ^ k0, second & LOW
        c2, c3 = ((first >> 32) & LOW) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return c0, c1, c2, c3


def gumbel(ids: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Gumbel noise -log(-log U) in float64 for token ``ids`` at ``position`` under ``seed`` (all int64).

    U = ((first word >> 8) + 0.5) * 2^-24 is evaluated in float64: in float32 the largest value would
    round to 1 and its noise to infinity.
    """
    zero = torch.zeros_like(ids)
    counter = (ids, position & LOW, (position >> 32) & LOW, zero)
    word = philox(counter, (seed & LOW, (seed >> 32) & LOW))[0]
    uniform = ((word >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))
