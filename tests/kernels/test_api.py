"""The public operations: what they refuse, which implementation they choose, what they compute in."""

import logging
from collections.abc import Callable

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from allspark_kernels import backend
from kernel_helpers import BF16, F16, F32, randn, sampling_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def plan() -> kernels.AttentionPlan:
    spans = np.zeros((1, 2), np.int32)
    return kernels.plan_attention([3], [40], spans, 32, CPU, 4, 2, 16)


def cache(*shape: int) -> torch.Tensor:
    return torch.zeros(shape or (4, 2, 32, 16))


def rotary(**changes: torch.Tensor) -> None:
    arguments = {
        "q": randn(3, 4, 16, seed=1),
        "k": randn(3, 2, 16, seed=1),
        "v": randn(3, 2, 16, seed=1),
        "cos_sin": randn(9, 16, seed=1),
        "positions": torch.arange(3),
        "slots": torch.arange(3),
        "k_cache": cache(),
        "v_cache": cache(),
    }
    kernels.rotary_kv_write(**{**arguments, **changes})


def attention(q: torch.Tensor, k: torch.Tensor | None = None, out: torch.Tensor | None = None) -> None:
    k_cache = cache() if k is None else k
    kernels.paged_attention(q, k_cache, torch.zeros_like(k_cache), plan(), 0.25, out)


def linear(*shape: int, out: torch.Tensor | None = None) -> None:
    kernels.linear(torch.zeros(shape), kernels.pack_linear(randn(8, 16, seed=1)), out)


def sample(**fields: object) -> None:
    kernels.sample(torch.zeros(2, 40), sampling_batch(2, **fields))


def sample_with_int64_top_k() -> None:
    batch = sampling_batch(2)
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    kernels.sample(
        torch.zeros(2, 40), kernels.SamplingBatch(**{**fields, "top_k": torch.zeros(2, dtype=torch.int64)})
    )


W = torch.ones(16)
X = torch.zeros(3, 16)
REFUSED: dict[str, Callable[[], object]] = {
    "pack: not a matrix": lambda: kernels.pack_linear(W),
    "pack: integers": lambda: kernels.pack_linear(torch.zeros(4, 4, dtype=torch.int32)),
    "pack: empty": lambda: kernels.pack_linear(torch.zeros(0, 4)),
    "pack: bias length": lambda: kernels.pack_linear(torch.zeros(4, 4), torch.zeros(5)),
    "linear: width": lambda: linear(3, 15),
    "linear: dimensions": lambda: linear(16),
    "linear: out shape": lambda: linear(3, 16, out=torch.zeros(3, 9)),
    "linear: out strides": lambda: linear(3, 16, out=torch.zeros(8, 3).T),
    "norm: weight length": lambda: kernels.rms_norm(X, torch.ones(15), 1e-5),
    "norm: weight dtype": lambda: kernels.rms_norm(X, W.to(BF16), 1e-5),
    "norm: columns strided": lambda: kernels.rms_norm(torch.zeros(16, 3).T, W, 1e-5),
    "add: residual shape": lambda: kernels.add_rms_norm(X, torch.zeros(2, 16), W, 1e-5),
    "add: residual dtype": lambda: kernels.add_rms_norm(X, X.to(BF16), W, 1e-5),
    "add: residual strided": lambda: kernels.add_rms_norm(X, torch.zeros(3, 32)[:, :16], W, 1e-5),
    "rotary: v heads": lambda: rotary(v=randn(3, 1, 16, seed=1)),
    "rotary: k tokens": lambda: rotary(k=randn(2, 2, 16, seed=1), v=randn(2, 2, 16, seed=1)),
    "rotary: heads strided": lambda: rotary(q=randn(3, 16, 4, seed=1).transpose(1, 2)),
    "rotary: table dtype": lambda: rotary(cos_sin=randn(9, 16, seed=1).double()),
    "rotary: table width": lambda: rotary(cos_sin=randn(9, 18, seed=1)),
    "rotary: positions dtype": lambda: rotary(positions=torch.arange(3, dtype=torch.int32)),
    "rotary: slots length": lambda: rotary(slots=torch.arange(4)),
    "rotary: cache heads": lambda: rotary(k_cache=cache(4, 1, 32, 16), v_cache=cache(4, 1, 32, 16)),
    "rotary: caches differ": lambda: rotary(v_cache=cache(5, 2, 32, 16)),
    "attention: tokens": lambda: attention(torch.zeros(2, 4, 16)),
    "attention: heads strided": lambda: attention(torch.zeros(3, 16, 4).transpose(1, 2)),
    "attention: span size": lambda: attention(torch.zeros(3, 4, 16), cache(4, 2, 16, 16)),
    "attention: span id": lambda: attention(torch.zeros(3, 4, 16), cache(0, 2, 32, 16)),
    "attention: out dtype": lambda: attention(torch.zeros(3, 4, 16), out=torch.zeros(3, 4, 16, dtype=F16)),
    "silu: odd": lambda: kernels.silu_mul(torch.zeros(2, 5)),
    "silu: strided": lambda: kernels.silu_mul(torch.zeros(2, 8)[:, ::2]),
    "sample: dtype": lambda: kernels.sample(torch.zeros(2, 40, dtype=F16), sampling_batch(2)),
    "sample: rows": lambda: kernels.sample(torch.zeros(3, 40), sampling_batch(2)),
    "sample: field dtype": sample_with_int64_top_k,
    "sample: seen width": lambda: sample(seen=torch.zeros(1, 39, dtype=torch.uint8)),
    "sample: bans": lambda: sample(ban_rows=[0], ban_ids=[1, 2]),
    "sample: mask words": lambda: sample(allow_mask=torch.zeros(2, 1, dtype=torch.int32)),
    "mark: bit": lambda: kernels.mark_seen(torch.zeros(1, 4, dtype=torch.uint8), 0, torch.arange(2), 3),
    "mark: dtype": lambda: kernels.mark_seen(torch.zeros(1, 4), 0, torch.arange(2), 1),
    "mark: slots": lambda: kernels.mark_seen(
        torch.zeros(1, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32), torch.arange(2), 1
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    with kernels.use_backend("torch"), pytest.raises(ValueError):
        REFUSED[case]()


def test_accepted_arguments_of_the_same_calls() -> None:
    """The cases above fail for the reason they name: unchanged, the calls succeed."""
    with kernels.use_backend("torch"):
        rotary()
        attention(torch.zeros(3, 4, 16))
        linear(3, 16, out=torch.zeros(3, 8))
        sample()
        kernels.add_rms_norm(X, torch.zeros(3, 16), W, 1e-5)


def test_compute_dtype() -> None:
    for dtype in (F32, BF16, F16):
        assert kernels.compute_dtype(CPU, dtype) == F32
        assert kernels.compute_dtype(CUDA, dtype) == dtype
    with pytest.raises(ValueError, match="float64"):
        kernels.compute_dtype(CPU, torch.float64)


def test_default_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.ENV, raising=False)
    assert kernels.backend_for(CUDA) == "triton"
    assert kernels.backend_for(CPU) in ("native", "torch")
    with pytest.raises(ValueError, match="no kernels for device meta"):
        kernels.backend_for(torch.device("meta"))


def test_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.ENV, "torch")
    assert kernels.backend_for(CUDA) == kernels.backend_for(CPU) == "torch"
    monkeypatch.setenv(backend.ENV, "cuda")
    with pytest.raises(ValueError, match="'cuda' is unknown"):
        kernels.backend_for(CPU)
    monkeypatch.setenv(backend.ENV, "native")
    with pytest.raises(ValueError, match="only the CPU"):
        kernels.backend_for(CUDA)
    monkeypatch.setenv(backend.ENV, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="cannot run on the CPU"):
        kernels.backend_for(CPU)


def test_use_backend_restores_what_was_before() -> None:
    before = backend.ops_for(False)
    with kernels.use_backend("torch"):
        assert backend.ops_for(False) is backend.ops_named("torch")
        with pytest.raises(ValueError, match="unknown"), kernels.use_backend("nothing"):
            pass
        assert backend.ops_for(False) is backend.ops_named("torch")
    assert backend.ops_for(False) is before


def test_a_missing_native_library_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from allspark_kernels import native

    monkeypatch.delenv(backend.ENV, raising=False)
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(backend, "_warned_native", False)
    with caplog.at_level(logging.WARNING, logger="allspark_kernels"):
        assert [kernels.backend_for(CPU) for _ in range(3)] == ["torch"] * 3
    assert len(caplog.records) == 1
    assert "using PyTorch" in caplog.text


def test_capture_without_graphs_is_the_step_itself() -> None:
    def step() -> None:
        raise AssertionError("must not run before it is asked to")

    with kernels.use_backend("torch"):
        assert kernels.capture(step, CPU) is step
