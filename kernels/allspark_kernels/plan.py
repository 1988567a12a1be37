"""The attention plan: the shape of one ragged step, computed once on the host and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .backend import ops_for

Int32Array = npt.NDArray[np.int32]
Lengths = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor

SPAN_SIZES = (16, 32, 64, 128)


@dataclass(slots=True, eq=False)
class AttentionPlan:
    """One step of B requests and T = sum(q_lens) tokens.

    Host arrays are int32 and C-contiguous: q_lens, kv_lens, decode_lens [B], cu_q [B + 1] (prefix sums of
    q_lens), span_table [B, max_spans]. ``state`` belongs to the implementation (work lists, device
    tensors, workspaces). ``capacity`` is 0, or the number of rows of a plan made for graph capture.
    """

    device: torch.device
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    span_size: int
    q_lens: Int32Array
    kv_lens: Int32Array
    decode_lens: Int32Array
    cu_q: Int32Array
    span_table: Int32Array
    num_tokens: int
    max_span: int
    capacity: int = 0
    max_kv_len: int = 0
    state: Any = None

    @property
    def num_requests(self) -> int:
        """B, the number of requests of the step."""
        return len(self.q_lens)

    def refill(self, kv_lens: Lengths, span_table: npt.NDArray[np.int32] | torch.Tensor) -> None:
        """Put another decode step into a plan from ``reserve_decode_plan``; device addresses do not change.

        kv_lens [b] and span_table [b, <= max_spans] with b <= capacity; rows beyond b are padding: they
        read nothing and their output is zero. Raises ValueError if the step does not fit.
        """
        if not self.capacity:
            raise ValueError("only a plan from reserve_decode_plan can be refilled")
        lens = _int32(kv_lens, "kv_lens")
        table = _table(span_table, len(lens))
        if len(lens) > self.capacity or (lens.size and int(lens.max()) > self.max_kv_len):
            raise ValueError(
                f"step of {len(lens)} rows up to {lens.max(initial=0)} tokens exceeds the plan's "
                f"{self.capacity} rows of {self.max_kv_len} tokens; reserve a larger plan"
            )
        self.max_span = _check_spans(lens, table, self.span_size)
        self.kv_lens[:] = 0
        self.kv_lens[: len(lens)] = lens
        width = min(table.shape[1], self.span_table.shape[1])
        self.span_table[: len(lens), :width] = table[:, :width]
        _prepare(self)


def plan_attention(
    q_lens: Lengths,
    kv_lens: Lengths,
    span_table: npt.NDArray[np.int32] | torch.Tensor,
    span_size: int,
    device: torch.device | str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    decode_lens: Lengths | None = None,
) -> AttentionPlan:
    """Plan one step of B requests.

    q_lens [B] new tokens, kv_lens [B] cached tokens including the new ones, span_table [B, max_spans]
    int32 span ids in order (entries past ceil(kv_len / span_size) are never read). Query i of request b
    stands at position kv_lens[b] - q_lens[b] + i and sees the keys 0..that position.

    decode_lens [B] says how many of a request's last query tokens are generated rather than prompt
    tokens. On CUDA generated tokens always take the decode kernel and prompt tokens always the prefill
    kernel, so results do not depend on chunking or on recomputation after a pre-emption, bit for bit.
    Without it a request with one query token counts as decoding.

    Raises ValueError on lengths, spans or head counts that do not fit together.
    """
    q, kv = _int32(q_lens, "q_lens"), _int32(kv_lens, "kv_lens")
    table = _table(span_table, len(q))
    decode = (q == 1).astype(np.int32) if decode_lens is None else _int32(decode_lens, "decode_lens")
    _check_heads(span_size, num_q_heads, num_kv_heads, head_dim)
    if len(kv) != len(q) or len(decode) != len(q):
        raise ValueError(f"q_lens, kv_lens, decode_lens have {len(q)}, {len(kv)}, {len(decode)} entries")
    if len(q) == 0 or int(q.min()) < 1 or bool((kv < q).any()):
        raise ValueError("every request needs at least one query token and kv_len >= q_len")
    if bool((decode < 0).any()) or bool((decode > q).any()):
        raise ValueError("decode_lens must lie between 0 and q_lens")
    max_span = _check_spans(kv, table, span_size)
    cu_q = np.zeros(len(q) + 1, np.int32)
    np.cumsum(q, out=cu_q[1:])
    plan = AttentionPlan(
        device=torch.device(device),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        span_size=span_size,
        q_lens=q,
        kv_lens=kv,
        decode_lens=decode,
        cu_q=cu_q,
        span_table=table,
        num_tokens=int(cu_q[-1]),
        max_span=max_span,
        max_kv_len=int(kv.max()),
    )
    _prepare(plan)
    return plan


def reserve_decode_plan(
    capacity: int,
    max_kv_len: int,
    span_size: int,
    device: torch.device | str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    shared: AttentionPlan | None = None,
) -> AttentionPlan:
    """A decode plan of ``capacity`` one-token rows with buffers for ``max_kv_len`` tokens each.

    Its launches and addresses are the same for every step, so they can be captured in a graph; call
    ``refill`` before each replay. Its workspace on a GPU grows with capacity times max_kv_len: with
    ``shared``, it is that of another reserved plan, at least as large, which never runs at the same time.
    Raises ValueError on impossible sizes.
    """
    _check_heads(span_size, num_q_heads, num_kv_heads, head_dim)
    if capacity < 1 or max_kv_len < 1:
        raise ValueError(f"a plan needs capacity >= 1 and max_kv_len >= 1, not {capacity} and {max_kv_len}")
    ones = np.ones(capacity, np.int32)
    plan = AttentionPlan(
        device=torch.device(device),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        span_size=span_size,
        q_lens=ones,
        kv_lens=np.zeros(capacity, np.int32),
        decode_lens=ones,
        cu_q=np.arange(capacity + 1, dtype=np.int32),
        span_table=np.zeros((capacity, -(-max_kv_len // span_size)), np.int32),
        num_tokens=capacity,
        max_span=-1,
        capacity=capacity,
        max_kv_len=max_kv_len,
    )
    _prepare(plan, None if shared is None else shared.state)
    return plan


def _prepare(plan: AttentionPlan, shared: Any = None) -> None:
    prepare = ops_for(plan.device.type == "cuda").prepare_plan
    plan.state = prepare(plan, shared)


def _int32(values: Lengths, name: str) -> Int32Array:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a vector of integers, not {array.dtype}{list(array.shape)}")
    return np.array(array, np.int32)


def _table(table: npt.NDArray[np.int32] | torch.Tensor, num_requests: int) -> Int32Array:
    array = table.cpu().numpy() if isinstance(table, torch.Tensor) else table
    if array.ndim != 2 or array.dtype != np.int32 or array.shape[0] != num_requests:
        raise ValueError(
            f"span_table must be int32 [{num_requests}, max_spans], not {array.dtype}{list(array.shape)}"
        )
    return np.ascontiguousarray(array)


def _check_heads(span_size: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if span_size not in SPAN_SIZES:
        raise ValueError(f"span_size {span_size} is not one of {SPAN_SIZES}")
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")


def _check_spans(kv_lens: Int32Array, table: Int32Array, span_size: int) -> int:
    """Largest span id in use; raises if a request's spans are missing or negative."""
    num_spans = -(-kv_lens // span_size)
    if num_spans.size and int(num_spans.max()) > table.shape[1]:
        raise ValueError(
            f"span_table has {table.shape[1]} columns, the longest request needs {num_spans.max()}"
        )
    used = np.arange(table.shape[1])[None, :] < num_spans[:, None]
    if bool((table[used] < 0).any()):
        raise ValueError("span_table has a negative span id among the spans in use")
    return int(table[used].max(initial=-1))
