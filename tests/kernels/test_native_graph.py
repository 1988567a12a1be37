"""Captured steps give, bit for bit, what the same step gives when it is run call by call."""

import threading

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from allspark_kernels import native

if not native.available():
    pytest.skip(str(native.unavailable_reason), allow_module_level=True)

HIDDEN, HEADS, KV_HEADS, DIM, SPAN, CAPACITY, LAYERS, VOCAB = 48, 6, 2, 16, 16, 5, 3, 100


class Step:
    """A small decoder for up to CAPACITY requests; ids, positions and slots at fixed addresses."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)

        def weight(n: int, k: int) -> kernels.PackedLinear:
            return kernels.pack_linear(torch.randn(n, k, generator=g).bfloat16() * 0.2)

        self.table = torch.randn(VOCAB, HIDDEN, generator=g)
        width = (HEADS + 2 * KV_HEADS) * DIM
        shapes = {
            "qkv": (width, HIDDEN),
            "out": (HIDDEN, HEADS * DIM),
            "up": (160, HIDDEN),
            "down": (HIDDEN, 80),
        }
        self.layers = [{name: weight(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
        self.head = weight(VOCAB, HIDDEN)
        self.norm, self.head_norm = torch.ones(HIDDEN), torch.randn(DIM, generator=g)
        self.caches = torch.randn(LAYERS, 2, 80, KV_HEADS, SPAN, DIM, generator=g).bfloat16()
        self.cos_sin = torch.randn(300, DIM, generator=g)
        self.plan = kernels.reserve_decode_plan(CAPACITY, 256, SPAN, "cpu", HEADS, KV_HEADS, DIM)
        self.ids, self.positions, self.slots = torch.zeros(3, CAPACITY, dtype=torch.int64).unbind(0)
        self.slots.fill_(-1)
        self.logits = torch.empty(0)

    def fill(self, kv_lens: list[int], seed: int) -> None:
        table = np.arange(len(kv_lens) * 16, dtype=np.int32).reshape(len(kv_lens), 16)
        self.plan.refill(kv_lens, table)
        self.slots.fill_(-1)
        self.positions.zero_()
        self.ids.copy_(torch.randint(0, VOCAB, (CAPACITY,), generator=torch.Generator().manual_seed(seed)))
        for row, n in enumerate(kv_lens):
            self.positions[row] = n - 1
            self.slots[row] = int(table[row, (n - 1) // SPAN]) * SPAN + (n - 1) % SPAN

    def __call__(self) -> None:
        rows = len(self.ids)
        residual = self.table.index_select(0, self.ids).to(torch.float32)
        x = kernels.rms_norm(residual, self.norm, 1e-5)
        for layer, (keys, values) in zip(self.layers, self.caches, strict=True):
            qkv = kernels.linear(x, layer["qkv"]).view(rows, -1, DIM)
            q, k, v = qkv.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], 1)
            k = kernels.rms_norm(k.reshape(-1, DIM), self.head_norm, 1e-5).view(rows, -1, DIM)
            kernels.rotary_kv_write(q, k, v, self.cos_sin, self.positions, self.slots, keys, values)
            x = kernels.paged_attention(q, keys, values, self.plan, 0.25).view(rows, -1)
            x = kernels.add_rms_norm(kernels.linear(x, layer["out"]), residual, self.norm, 1e-5)
            x = kernels.linear(kernels.silu_mul(kernels.linear(x, layer["up"])), layer["down"])
            x = kernels.add_rms_norm(x, residual, self.norm, 1e-5)
        self.logits = kernels.linear(x, self.head)


def test_replay_equals_the_step() -> None:
    with kernels.use_backend("native"), torch.inference_mode():
        eager, captured = Step(), Step()
        replay = native.capture(captured)
        logits = captured.logits
        for seed, kv_lens in enumerate(([1], [30, 200, 17], [256] * CAPACITY, [40, 41], [7])):
            for step in (eager, captured):
                step.fill(kv_lens, seed)
            eager()
            noise = [torch.randn(n) for n in (500, 5000, 50000)]  # memory outside the recording is in use
            replay()
            assert captured.logits is logits
            assert torch.equal(logits[: len(kv_lens)], eager.logits[: len(kv_lens)]), kv_lens
            assert torch.equal(eager.caches, captured.caches)
            del noise


def test_memory_of_the_recording_is_reused_inside_it() -> None:
    step = Step()
    with kernels.use_backend("native"), torch.inference_mode():
        replay = native.capture(step)
    idle = replay._kept[1]._idle  # type: ignore[attr-defined]
    floats = sum(size // 4 * len(blocks) for size, blocks in idle.items())
    assert 0 < floats <= CAPACITY * (160 + 160 + 80 + 6 * HIDDEN + HEADS * DIM + KV_HEADS * DIM)


def test_a_step_that_reads_back_is_refused() -> None:
    with kernels.use_backend("native"):
        with pytest.raises(ValueError, match="read back"):
            native.capture(lambda: torch.ones(3).sum().item())
        x = torch.ones(1, 8)
        assert torch.equal(kernels.rms_norm(x, torch.ones(8), 0.0), x)


def test_a_slot_outside_the_cache_is_reported() -> None:
    step = Step()
    with kernels.use_backend("native"), torch.inference_mode():
        replay = native.capture(step)
        step.fill([4], 0)
        step.slots[0] = 10**6
        with pytest.raises(ValueError, match="slot"):
            replay()


def test_other_threads_are_not_recorded() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8)
    out: list[torch.Tensor] = []

    def step() -> None:
        other = threading.Thread(target=lambda: out.append(native.rms_norm(x, weight, 0.0)))
        other.start()
        other.join()
        out.append(native.rms_norm(x * 3.0, weight, 0.0))

    with kernels.use_backend("native"):
        replay = native.capture(step)
        assert torch.equal(out[0], x)
        out[0].zero_()
        replay()
    assert torch.equal(out[0], torch.zeros(4, 8)) and torch.equal(out[1], x)
