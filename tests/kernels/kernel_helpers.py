"""Independent float64 references, inputs and tolerances of the kernel tests."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from allspark_kernels import SamplingBatch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
NAN = float("nan")


@dataclass(frozen=True)
class Place:
    """Where a test runs: "torch", "interpreter" (Triton on CPU tensors) or "triton" (CUDA)."""

    name: str
    device: str


def generator(seed: int) -> torch.Generator:
    """CPU generator, so that inputs are the same on every device."""
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = F32, device: str = "cpu") -> torch.Tensor:
    """Standard normal values rounded to ``dtype``."""
    return torch.randn(shape, generator=generator(seed)).to(dtype).to(device)


# Two units in the last place: the interpreter truncates to bfloat16 where the device rounds.
UNITS = {F32: 2.0**-22, F16: 2.0**-9.5, BF16: 2.0**-6.5}


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    inner: torch.dtype = F32,
    size: float = 4.0,
) -> None:
    """Compare with a float64 reference; NaN anywhere in ``actual`` fails.

    Allowed are two roundings of the result to ``dtype``, and an inner error of ``size`` roundings of a
    number near 1 to ``inner`` (sums of float32, or weights rounded to the dtype of the matrix product).
    """
    wide, expected = actual.double().cpu(), expected.double().cpu()
    assert wide.shape == expected.shape, f"shape {tuple(wide.shape)}, not {tuple(expected.shape)}"
    assert not wide.isnan().any(), f"{int(wide.isnan().sum())} values are NaN"
    allowed = UNITS[dtype] * expected.abs() + UNITS[inner] * size
    excess = (wide - expected).abs() - allowed
    assert not (excess > 0).any(), f"error exceeds what is allowed by {float(excess.max()):.3e}"


@dataclass
class Step:
    """A ragged step with its cache; unused slots and spans hold NaN, unused table entries are absurd."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    table: np.ndarray
    span_size: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0

    def expected(self) -> torch.Tensor:
        """Dense causal attention per request in float64: [T, Hq, D]."""
        results, start = [], 0
        for b, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            k, v = (self._keys(cache, b, kv_len) for cache in (self.k_cache, self.v_cache))
            q = self.q[start : start + q_len].double().cpu().transpose(0, 1)
            ratio = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(ratio, 0), v.repeat_interleave(ratio, 0)
            scores = q @ k.transpose(1, 2) * self.scale
            if self.soft_cap:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            distance = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)[None, :]
            visible = (distance >= 0) & (distance < (self.window or kv_len))
            weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
            results.append((weights @ v).transpose(0, 1))
            start += q_len
        return torch.cat(results)

    def _keys(self, cache: torch.Tensor, request: int, kv_len: int) -> torch.Tensor:
        spans = self.table[request, : -(-kv_len // self.span_size)].astype(np.int64)
        whole = cache[torch.from_numpy(spans).to(cache.device)].double().cpu()
        return whole.transpose(0, 1).flatten(1, 2)[:, :kv_len]


def make_step(
    q_lens: list[int],
    kv_lens: list[int],
    heads: tuple[int, int, int],
    span_size: int = 32,
    dtype: torch.dtype = F32,
    device: str = "cpu",
    seed: int = 0,
) -> Step:
    """Random queries and cache for requests of these lengths; heads = (query heads, KV heads, size)."""
    num_q_heads, num_kv_heads, dim = heads
    counts = [-(-length // span_size) for length in kv_lens]
    order = torch.randperm(sum(counts) + 2, generator=generator(seed)).tolist()
    table = np.full((len(kv_lens), max(counts) + 1), 2**30, np.int32)
    caches = [torch.full((len(order), num_kv_heads, span_size, dim), NAN) for _ in range(2)]
    for b, (length, count) in enumerate(zip(kv_lens, counts, strict=True)):
        table[b, :count] = [order.pop() for _ in range(count)]
        for which, cache in enumerate(caches):
            values = randn(length, num_kv_heads, dim, seed=1000 * seed + 10 * b + which)
            for position in range(0, length, span_size):
                part = values[position : position + span_size].transpose(0, 1)
                cache[table[b, position // span_size], :, : part.shape[1]] = part
    # Queries are a view of a wider fused output, as in the engine.
    fused = randn(
        sum(q_lens), (num_q_heads + 2 * num_kv_heads) * dim, seed=seed + 7, dtype=dtype, device=device
    )
    q = fused[:, : num_q_heads * dim].view(sum(q_lens), num_q_heads, dim)
    k_cache, v_cache = (cache.to(dtype).to(device) for cache in caches)
    return Step(q, k_cache, v_cache, q_lens, kv_lens, table, span_size, dim**-0.5)


def sampling_batch(rows: int, device: str = "cpu", **fields: object) -> SamplingBatch:
    """A batch with neutral settings except for ``fields`` (lists or tensors)."""
    kinds = {
        "temperature": (F32, 1.0),
        "top_k": (torch.int32, 0),
        "top_p": (F32, 0.0),
        "seed": (torch.int64, 0),
        "position": (torch.int64, 0),
        "repetition_penalty": (F32, 1.0),
        "presence_penalty": (F32, 0.0),
        "suppress_repetition": (torch.bool, False),
        "slot": (torch.int32, 0),
        "ban_rows": (torch.int64, []),
        "ban_ids": (torch.int64, []),
    }
    values: dict[str, torch.Tensor | None] = {}
    for name, (dtype, default) in kinds.items():
        value = fields.pop(name, default)
        is_single = isinstance(value, int | float)
        values[name] = torch.tensor([value] * rows if is_single else value, dtype=dtype, device=device)
    for name in ("seen", "allow_mask"):
        tensor = fields.pop(name, None)
        assert tensor is None or isinstance(tensor, torch.Tensor)
        values[name] = None if tensor is None else tensor.to(device)
    assert not fields, f"unknown fields {fields}"
    return SamplingBatch(**values)  # type: ignore[arg-type]
