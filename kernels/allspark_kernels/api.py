"""The operations, one signature each: cheap checks, then the implementation of the tensor's device.

Every function raises ValueError when shapes, dtypes or strides do not fit together (a wrong number of
dimensions shows as an unpacking error). The checks run in every layer of every step, so they are written
for speed: one read of each attribute, no slices of torch.Size. Nothing reads tensor contents.
"Compute dtype" is what ``backend.compute_dtype`` returns. On CUDA the tensors' device must be the current
device of the calling thread, as for every kernel launch.

Row t of every result depends, bit for bit, only on row t's inputs (and its own KV), never on how many
other rows there are or where they stand; this holds for the native and the Triton implementation.
"""

import math

import torch

from .backend import ops_for, ops_named
from .kv_format import GRANULE, QUANTISED_DTYPES, cache_row_width
from .lora import LoraPlan, LoraSite
from .plan import AttentionPlan
from .quantised import QuantisedWeight
from .types import FLOAT_DTYPES, PackedLinear, SamplingBatch


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, rounds_inputs: bool = False
) -> PackedLinear:
    """Lay out weight [N, K] (and bias [N]) once for its device; the result is what ``linear`` takes.

    Weight and bias are float32, bfloat16 or float16; the caller may drop them afterwards. ``rounds_inputs``
    rounds x to the weight's dtype before the product, as matrix units do: several times faster on CPUs that
    multiply bfloat16. On CUDA x has that dtype already.
    """
    if weight.ndim != 2 or weight.dtype not in FLOAT_DTYPES or 0 in weight.shape:
        raise ValueError(f"weight must be a non-empty float matrix [N, K], not {_describe(weight)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        raise ValueError(f"bias must be [{weight.shape[0]}] on {weight.device}, not {_describe(bias)}")
    return ops_for(weight.is_cuda).pack_linear(weight, bias, rounds_inputs)


def pack_quantised(weight: QuantisedWeight, bias: torch.Tensor | None = None) -> PackedLinear:
    """Lay out a quantised weight once for its device; ``linear`` widens it where it multiplies.

    Native results are, bit for bit, those of ``pack_linear(weight.dequantise(), bias)``. On CUDA widened
    values are rounded to the dtype of x. The bias [N] may have any float dtype.
    """
    codes = weight.codes
    if bias is not None and (bias.shape != codes.shape[:1] or bias.device != codes.device):
        raise ValueError(f"bias must be [{codes.shape[0]}] on {codes.device}, not {_describe(bias)}")
    return ops_for(codes.is_cuda).pack_quantised(weight, bias)


def linear(x: torch.Tensor, w: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times the packed weight [N, K] transposed, plus its bias: [T, N].

    x and out are contiguous, in the compute dtype; sums are kept in float32.
    """
    tokens, width = x.shape
    if width != w.in_features or not x.is_contiguous():
        raise ValueError(f"x must be contiguous [T, {w.in_features}], not {_describe(x)}")
    if out is not None and (out.shape != (tokens, w.out_features) or not out.is_contiguous()):
        raise ValueError(f"out must be contiguous [{tokens}, {w.out_features}], not {_describe(out)}")
    return ops_named(w.backend).linear(x, w, out)


def lora_add(x: torch.Tensor, site: LoraSite, plan: LoraPlan, out: torch.Tensor) -> None:
    """out[row] += B (A x[row]) for every row of the plan, with its slot's A and B (see ``lora.py``).

    x [T, K] and out [T, N] (the layer's own result) contiguous, in the compute dtype, T = plan.num_tokens;
    sums are kept in float32. Rows without an adapter, or whose adapter leaves this layer alone, are not
    touched.
    """
    tokens, width = x.shape
    if width != site.in_features or tokens != plan.num_tokens or not x.is_contiguous():
        raise _mismatch(f"x must be contiguous [{plan.num_tokens}, {site.in_features}]", x)
    if out.shape != (tokens, site.out_features) or not out.is_contiguous() or out.dtype is not x.dtype:
        raise _mismatch(f"out must be contiguous [{tokens}, {site.out_features}] {x.dtype}", out)
    ops_for(x.is_cuda).lora_add(x, site, plan, out)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    x [T, H] with contiguous rows (``x.stride(0)`` may exceed H), weight [H] in the dtype of x; the
    result is contiguous.
    """
    _, width = x.shape
    if weight.numel() != width or weight.dtype is not x.dtype or x.stride()[1] != 1:
        raise ValueError(f"rms_norm needs x [T, H], weight [H], not {_describe(x)}, {_describe(weight)}")
    return ops_for(x.is_cuda).rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place (rounded to its dtype), then rms_norm(residual, weight, eps).

    x and residual [T, H] contiguous, weight [H], all of one dtype.
    """
    _, width = shape = x.shape
    dtype = x.dtype
    if residual.shape != shape or weight.numel() != width:
        raise _mismatch("add_rms_norm needs x, residual [T, H] and weight [H]", x, residual, weight)
    if residual.dtype is not dtype or weight.dtype is not dtype:
        raise _mismatch("add_rms_norm needs one dtype", x, residual, weight)
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise _mismatch("add_rms_norm needs contiguous tensors", x, residual)
    return ops_for(x.is_cuda).add_rms_norm(x, residual, weight, eps)


def rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Rotate q in place; write the rotated k, and v, to the KV cache (Su et al., 2021).

    q [T, Hq, D], k and v [T, Hk, D] may be strided views of one fused output (rows ``stride(0)`` apart,
    the last two dimensions contiguous). cos_sin [max_pos, R] float32 holds [cos(R/2) | sin(R/2)] per
    position, R <= D; the pair (x[i], x[i + R/2]) turns together. positions, slots [T] int64;
    slot = span * span_size + offset, a negative slot is not written. Caches [num_spans, Hk, span_size, D]
    of floats, or quantised as ``kv_format`` says (int8 or uint8, last dimension D + 8 or D / 2 + 8).
    Positions must lie below max_pos and slots inside the cache: they are not checked on the device.
    """
    tokens, _, dim = q.shape
    k_shape = k.shape
    k_tokens, kv_heads, k_dim = k_shape
    if k_tokens != tokens or k_dim != dim or v.shape != k_shape:
        raise _mismatch("q, k, v must be [T, heads, D]", q, k, v)
    inner = (dim, 1)
    if q.stride()[1:] != inner or k.stride()[1:] != inner or v.stride()[1:] != inner:
        raise _mismatch("the heads of a token must be contiguous", q, k, v)
    _, rotary_dim = cos_sin.shape
    if rotary_dim > dim or rotary_dim % 2 or cos_sin.dtype is not torch.float32:
        raise _mismatch(f"cos_sin must be float32 [max_pos, even <= {dim}]", cos_sin)
    if positions.numel() != tokens or slots.numel() != tokens:
        raise _mismatch(f"positions and slots must have {tokens} entries", positions, slots)
    if positions.dtype is not torch.int64 or slots.dtype is not torch.int64:
        raise _mismatch("positions and slots must be int64", positions, slots)
    _check_caches(k_cache, v_cache, kv_heads, dim)
    ops_for(q.is_cuda).rotary_kv_write(q, k, v, cos_sin, positions, slots, k_cache, v_cache)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Causal softmax(q k^T * scale) v of every token of the step over its request's cached keys.

    A token sees at most the last ``window`` keys, its own included (0: all; sliding-window attention,
    Beltagy et al., 2020). With a soft cap c > 0 a score s counts as c tanh(s / c) (Gemma 2, 2024).
    q [T, Hq, D] (rows may be strided, heads contiguous), caches as for ``rotary_kv_write``,
    result [T, Hq, D] contiguous in the dtype of q. The plan says which tokens belong to which request;
    this step's K and V must already be in the cache.
    """
    shape, dim = q.shape, plan.head_dim
    if shape != (plan.num_tokens, plan.num_q_heads, dim) or q.stride()[1:] != (dim, 1):
        raise _mismatch(f"q must be [{plan.num_tokens}, {plan.num_q_heads}, {dim}] with contiguous heads", q)
    num_spans, span_size = _check_caches(k_cache, v_cache, plan.num_kv_heads, dim)
    if span_size != plan.span_size or num_spans <= plan.max_span:
        raise _mismatch(f"plan has spans of {plan.span_size} tokens up to id {plan.max_span}", k_cache)
    if window < 0 or not 0.0 <= soft_cap < math.inf:
        raise ValueError(f"window {window} and soft_cap {soft_cap} must not be negative (0: off)")
    if out is not None and (out.shape != shape or out.dtype is not q.dtype or not out.is_contiguous()):
        raise _mismatch("out must be contiguous, with shape and dtype of q", out, q)
    return ops_for(q.is_cuda).paged_attention(q, k_cache, v_cache, plan, scale, out, window, soft_cap)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] contiguous -> [T, I]: silu(first half) * second half (SwiGLU, Shazeer, 2020)."""
    _, width = gate_up.shape
    if width % 2 or not gate_up.is_contiguous():
        raise _mismatch("gate_up must be contiguous [T, even]", gate_up)
    return ops_for(gate_up.is_cuda).silu_mul(gate_up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] contiguous -> [T, I]: gelu(first half) * second half (GeGLU, Shazeer, 2020).

    gelu is approximated by tanh, as models trained with "gelu_pytorch_tanh" need it.
    """
    _, width = gate_up.shape
    if width % 2 or not gate_up.is_contiguous():
        raise _mismatch("gate_up must be contiguous [T, even]", gate_up)
    return ops_for(gate_up.is_cuda).gelu_mul(gate_up)


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """x [T, N] contiguous becomes cap tanh(x / cap) in place, cap > 0 (Gemma 2, 2024)."""
    if x.ndim != 2 or not x.is_contiguous() or not 0.0 < cap < math.inf:
        raise ValueError(f"soft_cap needs contiguous [T, N] and a cap above 0, not {_describe(x)} and {cap}")
    ops_for(x.is_cuda).soft_cap(x, cap)


def sample(logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor:
    """Choose one id per row of logits [B, V] float32 (modified in place): [B] int64.

    Order: repetition and presence penalty, bans, mask, top-k (ties: smaller id), softmax(x / T), top-p,
    draw. The draw is argmax over the kept ids of x / T - log(-log U), U from Philox4x32-10 (Salmon et
    al., 2011) with the row's seed as key and (id, position) as counter: a pure function of logits, seed
    and position. NaN logits are never chosen; a row with no candidate left gives -1.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32 [B, V], not {_describe(logits)}")
    rows, vocab = logits.shape
    for name in _ROW_FIELDS:
        field: torch.Tensor = getattr(p, name)
        if field.shape != (rows,) or field.dtype != _ROW_FIELDS[name]:
            raise ValueError(f"{name} must be {_ROW_FIELDS[name]} [{rows}], not {_describe(field)}")
    if p.seen is not None and (p.seen.shape[1] != vocab or p.seen.dtype != torch.uint8):
        raise ValueError(f"seen must be uint8 [S, {vocab}], not {_describe(p.seen)}")
    if p.ban_rows.shape != p.ban_ids.shape or p.ban_rows.ndim != 1:
        raise ValueError(f"ban_rows and ban_ids differ: {_describe(p.ban_rows)}, {_describe(p.ban_ids)}")
    if p.allow_mask is not None and p.allow_mask.shape != (rows, (vocab + 31) // 32):
        raise ValueError(f"allow_mask must be [{rows}, {(vocab + 31) // 32}], not {_describe(p.allow_mask)}")
    return ops_for(logits.is_cuda).sample(logits, p)


def mark_seen(seen: torch.Tensor, slot: int | torch.Tensor, ids: torch.Tensor, bit: int) -> None:
    """seen[slot, ids] |= bit, with bit 1 for prompt ids and 2 for generated ids.

    seen [S, V] uint8; slot: one row for all ids, or an int tensor [n] with the row of each id; ids [n]
    int64, negative ones are skipped. Ids and slots must lie inside ``seen``.
    """
    if seen.ndim != 2 or seen.dtype != torch.uint8 or bit not in (1, 2):
        raise ValueError(f"mark_seen needs seen uint8 [S, V] and bit 1 or 2, not {_describe(seen)} and {bit}")
    if ids.ndim != 1 or (not isinstance(slot, int) and slot.shape != ids.shape):
        raise ValueError(f"ids and slot must be vectors of one length, not {_describe(ids)}")
    ops_for(seen.is_cuda).mark_seen(seen, slot, ids, bit)


_ROW_FIELDS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "suppress_repetition": torch.bool,
    "slot": torch.int32,
}


def _check_caches(
    k_cache: torch.Tensor, v_cache: torch.Tensor, num_kv_heads: int, dim: int
) -> tuple[int, int]:
    """Number and size of the spans of a pair of caches that fit together."""
    shape = k_cache.shape
    num_spans, heads, span_size, cache_dim = shape
    width = dim
    if k_cache.dtype in QUANTISED_DTYPES:
        width = _quantised_width(k_cache, v_cache, dim)
    if heads != num_kv_heads or cache_dim != width or v_cache.shape != shape:
        raise _mismatch(f"caches must be [num_spans, {num_kv_heads}, span_size, {width}]", k_cache, v_cache)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise _mismatch("caches must be contiguous", k_cache, v_cache)
    return num_spans, span_size


def _quantised_width(k_cache: torch.Tensor, v_cache: torch.Tensor, dim: int) -> int:
    if dim % GRANULE or v_cache.dtype is not k_cache.dtype:
        raise _mismatch(
            f"quantised caches need one dtype and a head size {GRANULE} n, not {dim}", k_cache, v_cache
        )
    return cache_row_width(k_cache.dtype, dim)


def _mismatch(rule: str, *tensors: torch.Tensor) -> ValueError:
    return ValueError(f"{rule}; got " + ", ".join(_describe(x) for x in tensors))


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} strides {list(x.stride())} on {x.device}"
