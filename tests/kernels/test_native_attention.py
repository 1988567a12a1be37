"""Native paged attention: against float64, and bit for bit whatever the batch, chunks, spans and threads."""

from collections.abc import Iterator
from dataclasses import dataclass

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from allspark_kernels import native

if not native.available():
    pytest.skip(str(native.unavailable_reason), allow_module_level=True)

from allspark_kernels.native import library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    before = native.get_num_threads()
    with kernels.use_backend("native"):
        yield
    native.set_num_threads(before)


@dataclass
class Sequence:
    """One request: what its whole cache and all its queries are, at absolute positions."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def sequence(length: int, heads: tuple[int, int, int], seed: int) -> Sequence:
    q_heads, kv_heads, dim = heads
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(length, kv_heads, dim, generator=g)
    return Sequence(
        torch.randn(length, q_heads, dim, generator=g) * 2, k, torch.randn(length, kv_heads, dim, generator=g)
    )


class Cache:
    """Pages in random order; everything that no request owns is NaN."""

    def __init__(
        self, sequences: list[Sequence], kv_lens: list[int], span_size: int, dtype: torch.dtype
    ) -> None:
        counts = [-(-n // span_size) for n in kv_lens]
        total = sum(counts) + 3
        _, kv_heads, dim = sequences[0].k.shape
        order = torch.randperm(total, generator=torch.Generator().manual_seed(total)).numpy()
        self.table = np.full((len(kv_lens), max(counts) + 1), -1, np.int32)
        self.k = torch.full((total, kv_heads, span_size, dim), float("nan"), dtype=dtype)
        self.v = torch.full_like(self.k, float("nan"))
        for row, (s, n) in enumerate(zip(sequences, kv_lens, strict=True)):
            spans, order = order[: counts[row]], order[counts[row] :]
            self.table[row, : counts[row]] = spans
            position = torch.arange(n)
            span, offset = torch.from_numpy(spans)[position // span_size], position % span_size
            self.k[span, :, offset] = s.k[:n].to(dtype)
            self.v[span, :, offset] = s.v[:n].to(dtype)


def attend(
    sequences: list[Sequence],
    q_lens: list[int],
    kv_lens: list[int],
    span_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    compute: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """The rows of the last q_lens[b] of kv_lens[b] positions of each request."""
    cache = Cache(sequences, kv_lens, span_size, dtype)
    q_heads, dim = sequences[0].q.shape[1:]
    rows = [s.q[n - m : n] for s, m, n in zip(sequences, q_lens, kv_lens, strict=True)]
    fused = torch.full((sum(q_lens), q_heads + 3, dim), float("nan"), dtype=compute)
    fused[:, :q_heads] = torch.cat(rows).to(compute)
    heads = (q_heads, sequences[0].k.shape[1], dim)
    plan = kernels.plan_attention(q_lens, kv_lens, cache.table, span_size, "cpu", *heads)
    q = fused[:, :q_heads]
    out = torch.full(q.shape, float("nan"), dtype=compute)
    kernels.paged_attention(q, cache.k, cache.v, plan, dim**-0.5, out)
    return list(out.split(q_lens))


def oracle(*args: object, **more: object) -> list[torch.Tensor]:
    with kernels.use_backend("torch"):
        return attend(*args, compute=torch.float64, **more)  # type: ignore[arg-type]


HEADS = ((9, 3, 64), (4, 4, 32), (14, 2, 64), (16, 1, 128), (2, 1, 20), (3, 1, 96), (40, 2, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_matches_float64(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    q_lens, kv_lens = [1, 40, 1, 17, 5, 1], [1, 40, 77, 130, 1100, 600]
    sequences = [sequence(n, heads, 11 * i + n) for i, n in enumerate(kv_lens)]
    actual = attend(sequences, q_lens, kv_lens, 32, dtype)
    expected = oracle(sequences, q_lens, kv_lens, 32, dtype)
    for a, b in zip(actual, expected, strict=True):
        assert float((a - b).abs().max()) < 5e-6


@pytest.mark.parametrize("span_size", (16, 32, 64, 128))
def test_rows_do_not_depend_on_chunks_batch_or_span_size(span_size: int) -> None:
    heads, length = (6, 2, 64), 1100
    s = sequence(length, heads, 3)
    others = [sequence(70, heads, 4), sequence(900, heads, 5)]
    (whole,) = attend([s], [length], [length])
    for start, end in ((0, 1), (31, 32), (0, 33), (500, 530), (511, 513), (1030, 1100), (1099, 1100)):
        rows, *_ = attend([s, *others], [end - start, 70, 1], [end, 70, 900], span_size)
        assert torch.equal(rows, whole[start:end]), (start, end)


@pytest.mark.parametrize("heads", HEADS)
def test_threads_and_instruction_sets_agree(heads: tuple[int, int, int]) -> None:
    q_lens, kv_lens = [1, 9], [1500, 600]
    sequences = [sequence(n, heads, n) for n in kv_lens]
    native.set_num_threads(1)
    expected = attend(sequences, q_lens, kv_lens)
    for isa in library.runnable_isas():
        with library.use_isa(isa):
            for threads in (1, 2, 3, 16):
                native.set_num_threads(threads)
                actual = attend(sequences, q_lens, kv_lens)
                assert all(map(torch.equal, actual, expected)), (isa, threads)


def test_large_scores_do_not_overflow() -> None:
    s = sequence(200, (2, 1, 64), 9)
    s.q *= 300.0
    actual, expected = attend([s], [200], [200]), oracle([s], [200], [200])
    assert float((actual[0] - expected[0]).abs().max()) < 1e-3


def test_padding_rows_of_a_reserved_plan_are_zero() -> None:
    s = sequence(50, (6, 2, 32), 1)
    cache = Cache([s], [50], 16, torch.bfloat16)
    plan = kernels.reserve_decode_plan(4, 64, 16, "cpu", 6, 2, 32)
    plan.refill([50], cache.table)
    q = torch.randn(4, 6, 32)
    q[0] = s.q[49]
    out = kernels.paged_attention(q, cache.k, cache.v, plan, 32**-0.5)
    assert torch.equal(out[1:], torch.zeros(3, 6, 32))
    assert torch.equal(out[:1], attend([s], [1], [50])[0])
