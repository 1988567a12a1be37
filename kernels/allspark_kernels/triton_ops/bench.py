"""Speed of the GPU kernels beside PyTorch's own, in the layer shapes of an 8B-parameter model.

    python -m allspark_kernels.triton_ops.bench [--match TEXT]

Prints one JSON object per measurement: what was computed, microseconds of ours and of the reference (cuBLAS,
flash attention, PyTorch's operators), and the bytes or operations per second that ours reaches. Both run as
CUDA graphs, so neither pays for launches, with the L2 cache flushed before each run. Medians.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional

from .. import (
    QuantFormat,
    SamplingBatch,
    add_rms_norm,
    capture,
    combine_experts,
    grouped_linear,
    kv_format,
    linear,
    pack_experts,
    pack_linear,
    pack_quantised,
    paged_attention,
    plan_attention,
    quantise,
    route_experts,
    sample,
    silu_mul,
)

Run = Callable[[], object]


@dataclass(frozen=True)
class Shapes:
    """A model, and how much of it is measured: rows of products, (requests, context), (requests, prompt)."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: tuple[int, int, int] = (32, 8, 128)
    vocab: int = 128256
    experts: tuple[int, int, int] = (64, 8, 1024)
    rows: tuple[int, ...] = (1, 16, 64, 256, 4096)
    decode: tuple[tuple[int, int], ...] = ((1, 4096), (16, 2048), (64, 2048), (256, 1024), (1, 65536))
    prefill: tuple[tuple[int, int], ...] = ((1, 512), (1, 2048), (1, 8192), (8, 1024))
    span: int = 32
    dtype: torch.dtype = torch.bfloat16


TINY = Shapes(32, 48, (4, 2, 16), 200, (4, 2, 16), (1, 3), ((2, 40),), ((1, 20),), 16, torch.float32)


@dataclass(frozen=True)
class Case:
    """Two ways to compute the same; ``num_bytes`` and ``flops`` that are needed at least."""

    name: str
    ours: Run
    reference: Run | None
    num_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Result:
    """Microseconds, and what they mean; ``problem`` instead of figures where a case failed."""

    name: str
    ours_us: float = 0.0
    reference_us: float | None = None
    speedup: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    problem: str = ""


def seconds(run: Run, device: torch.device) -> float:
    """Median time of a captured ``run`` with a cold L2 cache."""
    from triton.testing import do_bench

    kept: list[object] = []  # results have to outlive the capture

    def step() -> None:
        kept[:] = [run()]

    replay = capture(step, device)
    return float(do_bench(replay, warmup=10, rep=50, return_mode="median")) / 1e3


def result_of(case: Case, seconds_of: Callable[[Run], float]) -> Result:
    """The measured case; an error becomes the problem of this case alone."""
    try:
        ours = seconds_of(case.ours)
        reference = None if case.reference is None else seconds_of(case.reference)
    except (RuntimeError, ValueError) as error:
        return Result(case.name, problem=f"{type(error).__name__}: {str(error).strip()[:300]}")
    return Result(
        case.name,
        round(ours * 1e6, 2),
        None if reference is None else round(reference * 1e6, 2),
        None if reference is None else round(reference / ours, 3),
        round(case.num_bytes / ours / 1e9, 1) if case.num_bytes else None,
        round(case.flops / ours / 1e12, 2) if case.flops else None,
    )


def linear_cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """Matrix products; quantised ones beside the same product in the model's dtype."""
    hidden, inner, dtype = shapes.hidden, shapes.intermediate, shapes.dtype
    num_q, num_kv, dim = shapes.heads
    matrices = {
        "qkv": ((num_q + 2 * num_kv) * dim, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "lm_head": (shapes.vocab, hidden),
    }
    for name, (n, k) in matrices.items():
        weight = torch.randn((n, k), device=device).to(dtype) * 0.02
        packed = {"": pack_linear(weight)}
        if name == "gate_up":
            for label, form in (("_int8", QuantFormat(8, 0)), ("_int4", QuantFormat(4, 128))):
                packed[label] = pack_quantised(quantise(weight, form))
        for label, own in packed.items():
            for rows in shapes.rows:
                if (name == "lm_head" or label) and rows > 256:
                    continue
                x = torch.randn((rows, k), device=device).to(dtype)
                yield Case(
                    f"linear{label} {name} [{rows}, {k}] x [{k}, {n}]",
                    lambda x=x, own=own: linear(x, own),  # type: ignore[misc]
                    lambda x=x, weight=weight: functional.linear(x, weight),  # type: ignore[misc]
                    own.nbytes + (rows * (n + k)) * dtype.itemsize,
                    2 * rows * n * k,
                )


def attention_cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """Decode over every kind of cache, and prefill, beside attention over contiguous keys and values."""
    for cache_mode in (0, 1, 2):
        for requests, context in shapes.decode:
            yield _attention(shapes, device, requests, context, 1, cache_mode)
    for requests, prompt in shapes.prefill:
        yield _attention(shapes, device, requests, prompt, prompt, 0)


def _attention(
    shapes: Shapes, device: torch.device, requests: int, context: int, q_len: int, cache_mode: int
) -> Case:
    (num_q, num_kv, dim), span, dtype = shapes.heads, shapes.span, shapes.dtype
    layout = kv_format(cache_mode, dtype, dim)
    per_request = -(-context // span)
    spans = torch.randperm(requests * per_request).int().view(requests, per_request)
    shape = (requests * per_request, num_kv, span, layout.row_width)
    caches = [_cache(shape, layout.dtype, device) for _ in range(2)]
    q = torch.randn((requests * q_len, num_q, dim), device=device).to(dtype)
    lens = [q_len] * requests
    plan = plan_attention(lens, [context] * requests, spans, span, device, num_q, num_kv, dim)
    keys, values = (torch.randn((requests, num_kv, context, dim), device=device).to(dtype) for _ in range(2))
    queries = q.view(requests, q_len, num_q, dim).transpose(1, 2)

    def reference() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=q_len > 1, enable_gqa=num_q > num_kv
        )

    kind = "decode" if q_len == 1 else "prefill"
    pairs = requests * (context if q_len == 1 else q_len * (q_len + 1) // 2)
    cached = 2 * requests * context * num_kv * layout.row_width * layout.dtype.itemsize
    return Case(
        f"{kind} cache_mode={cache_mode} {requests} x {context} tokens",
        lambda: paged_attention(q, caches[0], caches[1], plan, dim**-0.5),
        reference,
        cached + 2 * q.nbytes,
        4 * pairs * num_q * dim,
    )


def _cache(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.ones(shape, dtype=dtype, device=device)  # as good as any code; scales are tiny


def small_cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """Norm, activation and sampling."""
    hidden, dtype = shapes.hidden, shapes.dtype
    norm = torch.ones(hidden, device=device, dtype=dtype)
    for rows in shapes.rows:
        x, residual = (torch.randn((rows, hidden), device=device).to(dtype) for _ in range(2))
        yield Case(
            f"add_rms_norm [{rows}, {hidden}]",
            lambda x=x, residual=residual: add_rms_norm(x, residual, norm, 1e-5),  # type: ignore[misc]
            lambda x=x, residual=residual: functional.rms_norm(  # type: ignore[misc]
                residual.add_(x), (hidden,), norm, 1e-5
            ),
            4 * x.nbytes,
        )
        wide = torch.randn((rows, 2 * shapes.intermediate), device=device).to(dtype)
        yield Case(
            f"silu_mul [{rows}, {2 * shapes.intermediate}]",
            lambda wide=wide: silu_mul(wide),  # type: ignore[misc]
            lambda wide=wide: _silu_mul(wide),  # type: ignore[misc]
            wide.nbytes * 3 // 2,
        )
    for rows in (rows for rows in shapes.rows if rows <= 256):
        for top_k, top_p in ((0, 0.0), (50, 0.9)):
            logits = torch.randn((rows, shapes.vocab), device=device) * 3
            batch = _sampling_batch(rows, top_k, top_p, device)
            yield Case(
                f"sample [{rows}, {shapes.vocab}] top_k={top_k} top_p={top_p}",
                lambda logits=logits, batch=batch: sample(logits, batch),  # type: ignore[misc]
                lambda logits=logits, k=top_k, p=top_p: _drawn(logits, k, p),  # type: ignore[misc]
                logits.nbytes,
            )


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, 1)
    return functional.silu(gate) * up


def _sampling_batch(rows: int, top_k: int, top_p: float, device: torch.device) -> SamplingBatch:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    none = torch.empty(0, dtype=torch.int64, device=device)
    return SamplingBatch(
        temperature=full(0.8, torch.float32),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p, torch.float32),
        seed=full(7, torch.int64),
        position=full(9, torch.int64),
        repetition_penalty=full(1.0, torch.float32),
        presence_penalty=full(0.0, torch.float32),
        suppress_repetition=full(0, torch.bool),
        seen=None,
        slot=full(0, torch.int32),
        ban_rows=none,
        ban_ids=none,
    )


def _drawn(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The usual way in PyTorch: sort, cut, draw by an exponential race."""
    if top_k or top_p:
        values, ids = logits.sort(-1, descending=True)
        probs = (values / 0.8).softmax(-1)
        outside = probs.cumsum(-1) - probs > top_p
        outside[:, top_k:] = True
        probs = probs.masked_fill(outside, 0.0)
        index = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return ids.gather(1, index)
    probs = (logits / 0.8).softmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def expert_cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """A whole mixture-of-experts layer; as reference the dense layer of as many operations."""
    (num_experts, top_k, width), hidden, dtype = shapes.experts, shapes.hidden, shapes.dtype

    def experts(rows: int, columns: int, count: int) -> list[torch.Tensor]:
        return [torch.randn((rows, columns), device=device).to(dtype) * 0.02 for _ in range(count)]

    up, down = (pack_experts(experts(n, k, num_experts)) for n, k in ((2 * width, hidden), (hidden, width)))
    (dense_up,), (dense_down,) = experts(2 * width * top_k, hidden, 1), experts(hidden, width * top_k, 1)
    for rows in shapes.rows:
        x = torch.randn((rows, hidden), device=device).to(dtype)
        logits = torch.randn((rows, num_experts), device=device).to(dtype)

        def layer(x: torch.Tensor = x, logits: torch.Tensor = logits) -> torch.Tensor:
            routing = route_experts(logits, top_k, True)
            wide = grouped_linear(x, up, routing)
            inner = silu_mul(wide.flatten(0, 1)).view(*wide.shape[:2], width)
            return combine_experts(grouped_linear(inner, down, routing), routing)

        def dense(x: torch.Tensor = x) -> torch.Tensor:
            return functional.linear(_silu_mul(functional.linear(x, dense_up)), dense_down)

        used = min(num_experts, rows * top_k)
        yield Case(
            f"experts {num_experts} top {top_k} [{rows}, {hidden}]",
            layer,
            dense,
            used * 3 * width * hidden * dtype.itemsize,
            6 * rows * top_k * width * hidden,
        )


def all_cases(shapes: Shapes, device: torch.device) -> Iterator[Case]:
    """Every measurement, made one at a time: they need gigabytes."""
    yield from linear_cases(shapes, device)
    yield from attention_cases(shapes, device)
    yield from small_cases(shapes, device)
    yield from expert_cases(shapes, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; exit status 1 if a case failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m allspark_kernels.triton_ops.bench", description=__doc__)
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    device, failed = torch.device("cuda", torch.cuda.current_device()), False
    torch.manual_seed(0)
    with torch.inference_mode():
        for case in all_cases(Shapes(), device):
            if options.match not in case.name:
                continue
            result = result_of(case, lambda run: seconds(run, device))
            failed |= bool(result.problem)
            sys.stdout.write(json.dumps(asdict(result)) + "\n")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
