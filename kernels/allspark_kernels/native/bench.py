"""Speed of the native kernels on this machine, for the layer shapes of a 135M-parameter model.

``python -m allspark_kernels.native.bench`` prints one line per linear layer and row count beside PyTorch in
float32 and bfloat16, then what one step of the whole model costs. Times are the best of many runs.
"""

import sys
import time
from collections.abc import Callable

import torch

from .. import (
    AttentionPlan,
    add_rms_norm,
    capture,
    linear,
    pack_linear,
    paged_attention,
    plan_attention,
    reserve_decode_plan,
    rms_norm,
    rotary_kv_write,
    silu_mul,
    use_backend,
)
from ..types import PackedLinear
from . import get_num_threads

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 576, 1536, 49152, 30
Q_HEADS, KV_HEADS, DIM, SPAN = 9, 3, 64, 16
SHAPES = {
    "qkv": ((Q_HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "attention out": (HIDDEN, Q_HEADS * DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCAB, HIDDEN),
}
CACHE_BYTES = 100 << 20  # distinct weights in rotation, so that they come from memory as in a real step


def best_seconds(run: Callable[[int], object], budget_s: float = 0.4) -> float:
    """Shortest time of ``run(i)``, i = 0, 1, ..., within about ``budget_s`` (at least three runs)."""
    run(0)
    best, begin, i = float("inf"), time.perf_counter(), 0
    while i < 3 or time.perf_counter() - begin < budget_s:
        start = time.perf_counter()
        run(i)
        best = min(best, time.perf_counter() - start)
        i += 1
    return best


def _rate(seconds: float, rows: int, shape: tuple[int, int], itemsize: int) -> str:
    n, k = shape
    flops, num_bytes = 2 * rows * n * k / seconds, n * k * itemsize / seconds
    return f"{seconds * 1e6:8.0f} us {flops / 1e9:6.0f} GFLOP/s {num_bytes / 1e9:5.1f} GB/s"


def _linear_cell(shape: tuple[int, int], rows: int) -> str:
    n, k = shape
    copies = max(1, CACHE_BYTES // (n * k * 2))
    x, out = torch.randn(rows, k), torch.empty(rows, n)
    packed = [pack_linear(torch.randn(n, k).bfloat16(), rounds_inputs=True) for _ in range(copies)]
    return _rate(best_seconds(lambda i: linear(x, packed[i % copies], out)), rows, shape, 2)


def _torch_cell(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> str:
    n, k = shape
    copies = max(1, CACHE_BYTES // (n * k * dtype.itemsize))
    x = torch.randn(rows, k).to(dtype)
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
    seconds = best_seconds(lambda i: torch.nn.functional.linear(x, weights[i % copies]))
    return _rate(seconds, rows, shape, dtype.itemsize)


def bench_linear(name: str, shape: tuple[int, int], rows: int) -> None:
    """One line: native with bf16 weights, then PyTorch in float32 and in bfloat16."""
    cells = [_linear_cell(shape, rows)]
    cells += [_torch_cell(shape, rows, dtype) for dtype in (torch.float32, torch.bfloat16)]
    _say(f"{name:14} M={rows:<4}" + " |".join(cells))


class Model:
    """Random bf16 weights of the whole model, and a KV cache for ``requests`` of ``context`` tokens."""

    def __init__(self, requests: int, context: int) -> None:
        def weight(shape: tuple[int, int]) -> PackedLinear:
            return pack_linear((torch.randn(shape) * 0.02).bfloat16(), rounds_inputs=True)

        names = [name for name in SHAPES if name != "lm_head"]
        self.layers = [{name: weight(SHAPES[name]) for name in names} for _ in range(LAYERS)]
        self.lm_head = weight(SHAPES["lm_head"])
        self.norm = torch.ones(HIDDEN)
        spans = -(-context // SPAN)
        self.table = torch.arange(requests * spans, dtype=torch.int32).view(requests, spans)
        self.cache = torch.randn((LAYERS, 2, requests * spans, KV_HEADS, SPAN, DIM)).bfloat16()
        self.cos_sin = torch.randn(context, DIM)

    def forward(
        self, residual: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Embedded tokens [T, H] (changed in place) -> normed output [T, H]."""
        tokens = len(residual)
        x = rms_norm(residual, self.norm, 1e-5)
        for layer, (k_cache, v_cache) in zip(self.layers, self.cache, strict=True):
            qkv = linear(x, layer["qkv"]).view(tokens, -1, DIM)
            q, k, v = torch.split(qkv, [Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
            rotary_kv_write(q, k, v, self.cos_sin, positions, slots, k_cache, v_cache)
            x = paged_attention(q, k_cache, v_cache, plan, DIM**-0.5).view(tokens, -1)
            x = add_rms_norm(linear(x, layer["attention out"]), residual, self.norm, 1e-5)
            x = linear(silu_mul(linear(x, layer["gate_up"])), layer["down"])
            x = add_rms_norm(x, residual, self.norm, 1e-5)
        return x


def bench_decode(requests: int, context: int) -> None:
    """One line: a captured decode step, all requests at the end of ``context`` tokens."""
    model = Model(requests, context)
    plan = reserve_decode_plan(requests, context, SPAN, "cpu", Q_HEADS, KV_HEADS, DIM)
    residual = torch.randn(requests, HIDDEN)
    positions = torch.full((requests,), context - 1)
    slots = model.table[:, -1].long() * SPAN + (context - 1) % SPAN
    kv_lens = [context] * requests

    def forward() -> None:
        linear(model.forward(residual, positions, slots, plan), model.lm_head)

    replay = capture(forward, "cpu")

    def step(_: int) -> None:
        plan.refill(kv_lens, model.table)
        replay()

    _report(f"decode, {requests} requests, {context} tokens", best_seconds(step, 3.0), requests)


def bench_prefill(context: int) -> None:
    """One line: the prompt of one request in one step."""
    model = Model(1, context)
    positions = torch.arange(context)
    residual = torch.randn(context, HIDDEN)

    def step(_: int) -> None:
        plan = plan_attention([context], [context], model.table, SPAN, "cpu", Q_HEADS, KV_HEADS, DIM)
        linear(model.forward(residual, positions, positions, plan)[-1:], model.lm_head)

    _report(f"prefill, {context} tokens", best_seconds(step, 3.0), context)


def _report(title: str, seconds: float, tokens: int) -> None:
    _say(f"{title:34} {seconds * 1e3:7.2f} ms  {tokens / seconds:7.0f} tokens/s")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run everything on the native backend."""
    with use_backend("native"), torch.inference_mode():
        _say(f"{get_num_threads()} threads; native bf16 | PyTorch float32 | PyTorch bfloat16")
        for name, shape in SHAPES.items():
            for rows in (1, 16, 128):
                bench_linear(name, shape, rows)
        bench_decode(1, 256)
        bench_decode(16, 256)
        bench_decode(1, 4096)
        bench_prefill(128)
        bench_prefill(1024)


if __name__ == "__main__":
    main()
