"""Rotary position tables: cos and sin of every position, with the context extension already applied.

Sources: rotary embedding, Su et al. 2021; YaRN, Peng et al. 2023 (with its attention factor); LongRoPE, Ding
et al. 2024; the llama3 rule is the one published with Llama 3.1. Computed in float32, as the reference
implementations do: a more exact table would give other logits than the one the model was trained with.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from allspark_workers.engine.errors import UnsupportedModelError
from allspark_workers.models.architecture import ROPE_TYPES, Architecture, RopeParams


def settled(rope: RopeParams, max_length: int) -> RopeParams:
    """The parameters for requests of up to `max_length` tokens.

    LongRoPE has one set of divisors for the trained context and one beyond it. A sequence that crosses the
    border would have to be computed anew with the other set, and what is cached for one is worthless for the
    other; so the longest request decides for the model, once.
    """
    if rope.kind != "longrope" or rope.divisors:
        return rope
    is_long = max_length > rope.original_max_positions
    return replace(rope, divisors=rope.long_divisors if is_long else rope.short_divisors)


def cos_sin_table(rope: RopeParams, length: int) -> torch.Tensor:
    """Table [length, rotary_dim] float32: row p is [cos | sin] of position p, times the attention factor."""
    inverse, scale = inverse_frequencies(rope)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(scale)


def inverse_frequencies(rope: RopeParams) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] float32 and the factor for cos and sin."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    if rope.kind == "longrope":
        return _longrope(rope, exponents)
    inverse = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        inverse = inverse / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "default":
        return inverse, 1.0
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, exponents), _yarn_attention_factor(rope)
    known = ", ".join(ROPE_TYPES)
    raise UnsupportedModelError(f"rope scaling {rope.kind!r} is not supported; known: {known}")


def _longrope(rope: RopeParams, exponents: torch.Tensor) -> tuple[torch.Tensor, float]:
    inverse = 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * rope.theta**exponents)
    scale = rope.attention_factor
    if scale is None:
        stretch = math.log(rope.factor) / math.log(rope.original_max_positions) if rope.factor > 1 else 0.0
        scale = math.sqrt(1.0 + stretch)
    return inverse, scale


def _llama3(rope: RopeParams, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, those between are blended."""
    context, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > context / low, inverse / rope.factor, inverse)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: RopeParams, exponents: torch.Tensor) -> torch.Tensor:
    """Interpolate dimensions that turn less than `beta_slow` times in the trained context, keep fast ones."""
    powers = rope.theta**exponents
    low = _yarn_dimension(rope, rope.beta_fast)
    high = _yarn_dimension(rope, rope.beta_slow)
    if rope.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    kept = 1 - ((ramp - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_dimension(rope: RopeParams, turns: float) -> float:
    """The (real-valued) dimension whose frequency makes `turns` rotations over the trained context."""
    context = rope.original_max_positions
    return rope.rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeParams) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def half_split_rows(arch: Architecture, stacked: torch.Tensor) -> torch.Tensor:
    """Rows of q, k, v [rows, ...], or their biases, so that a rotation pairs x[i] with x[i + R / 2]."""
    if not arch.is_rope_interleaved:
        return stacked
    turned = (arch.num_heads + arch.num_kv_heads) * arch.head_dim
    heads = stacked[:turned].reshape(-1, arch.head_dim, *stacked.shape[1:])
    rotated = heads[:, : arch.rope.rotary_dim]
    halves = torch.cat((rotated[:, 0::2], rotated[:, 1::2]), 1)
    heads = torch.cat((halves, heads[:, arch.rope.rotary_dim :]), 1)
    return torch.cat((heads.flatten(0, 1), stacked[turned:]))
