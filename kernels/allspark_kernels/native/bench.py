"""Speed of the native kernels on this machine, for the layer shapes of a 135M-parameter model.

``python -m allspark_kernels.native.bench`` prints one line per linear layer and row count beside PyTorch in
float32 and bfloat16, then what one step of the whole model costs. Times are the best of many runs.
"""

import sys
import time
from collections.abc import Callable

import torch

from .. import (
    add_rms_norm,
    linear,
    pack_linear,
    paged_attention,
    plan_attention,
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
    packed = [pack_linear(torch.randn(n, k).bfloat16()) for _ in range(copies)]
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
    """Random bf16 weights of the whole model and a KV cache of ``requests`` requests."""

    def __init__(self, requests: int, context: int) -> None:
        def weight(shape: tuple[int, int]) -> PackedLinear:
            return pack_linear((torch.randn(shape) * 0.02).bfloat16())

        names = [name for name in SHAPES if name != "lm_head"]
        self.layers = [{name: weight(SHAPES[name]) for name in names} for _ in range(LAYERS)]
        self.lm_head = weight(SHAPES["lm_head"])
        self.norm = torch.ones(HIDDEN)
        self.spans_each = -(-context // SPAN)
        shape = (LAYERS, 2, requests * self.spans_each, KV_HEADS, SPAN, DIM)
        self.cache = torch.randn(shape).bfloat16()
        self.cos_sin = torch.randn(context, DIM)

    def step(self, q_lens: list[int], kv_lens: list[int]) -> torch.Tensor:
        """Logits [B, V] of the last token of each request."""
        requests = len(q_lens)
        table = torch.arange(requests * self.spans_each, dtype=torch.int32).view(requests, -1)
        plan = plan_attention(q_lens, kv_lens, table, SPAN, "cpu", Q_HEADS, KV_HEADS, DIM)
        spans = zip(q_lens, kv_lens, strict=True)
        positions = torch.cat([torch.arange(n - m, n) for m, n in spans])
        owner = torch.repeat_interleave(torch.arange(requests), torch.tensor(q_lens))
        slots = owner * self.spans_each * SPAN + positions
        residual = torch.randn(len(positions), HIDDEN)
        x = rms_norm(residual, self.norm, 1e-5)
        for layer, (k_cache, v_cache) in zip(self.layers, self.cache, strict=True):
            qkv = linear(x, layer["qkv"]).view(len(positions), -1, DIM)
            q, k, v = torch.split(qkv, [Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
            rotary_kv_write(q, k, v, self.cos_sin, positions, slots, k_cache, v_cache)
            x = paged_attention(q, k_cache, v_cache, plan, DIM**-0.5).view(len(positions), -1)
            x = add_rms_norm(linear(x, layer["attention out"]), residual, self.norm, 1e-5)
            x = linear(silu_mul(linear(x, layer["gate_up"])), layer["down"])
            x = add_rms_norm(x, residual, self.norm, 1e-5)
        last = torch.tensor(q_lens).cumsum(0) - 1
        return linear(x[last].contiguous(), self.lm_head)


def bench_step(title: str, q_lens: list[int], kv_lens: list[int]) -> None:
    """One line: what a step costs and how many tokens a second that makes."""
    model = Model(len(q_lens), max(kv_lens))
    seconds = best_seconds(lambda _: model.step(q_lens, kv_lens), 3.0)
    _say(f"{title:34} {seconds * 1e3:7.2f} ms  {sum(q_lens) / seconds:7.0f} tokens/s")


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
        bench_step("decode, 1 request, 256 tokens", [1], [256])
        bench_step("decode, 16 requests, 256 tokens", [1] * 16, [256] * 16)
        bench_step("decode, 1 request, 4096 tokens", [1], [4096])
        bench_step("prefill, 128 tokens", [128], [128])
        bench_step("prefill, 1024 tokens", [1024], [1024])


if __name__ == "__main__":
    main()
