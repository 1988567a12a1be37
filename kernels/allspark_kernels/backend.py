"""Which implementation serves a device: Triton on CUDA, the native C library on CPU, PyTorch anywhere.

``ALLSPARK_KERNELS=torch|native|triton`` forces one for every device. A forced implementation that
cannot run is an error; a missing native library without force means PyTorch, and is logged once.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch

from .experts import PackedExperts, Routing
from .lora import LoraPlan, LoraSite
from .quantised import QuantisedWeight, Weight
from .types import FLOAT_DTYPES, PackedLinear, SamplingBatch

logger = logging.getLogger(__name__)

BACKENDS = ("torch", "native", "triton")
ENV = "ALLSPARK_KERNELS"


class Ops(Protocol):
    """What an implementation module provides. Arguments were checked by ``api`` before they get here."""

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, rounds_inputs: bool
    ) -> PackedLinear: ...
    def linear(self, x: torch.Tensor, w: PackedLinear, out: torch.Tensor | None) -> torch.Tensor: ...
    def lora_add(self, x: torch.Tensor, site: LoraSite, plan: LoraPlan, out: torch.Tensor) -> None: ...
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...
    def rotary_kv_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None: ...
    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: Any,
        scale: float,
        out: torch.Tensor | None,
        window: int,
        soft_cap: float,
    ) -> torch.Tensor: ...
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    def soft_cap(self, x: torch.Tensor, cap: float) -> None: ...
    def pack_quantised(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> PackedLinear: ...
    def pack_experts(self, weights: Sequence[Weight], rounds_inputs: bool) -> PackedExperts: ...
    def route_experts(self, logits: torch.Tensor, top_k: int, is_normalised: bool) -> Routing: ...
    def grouped_linear(self, x: torch.Tensor, w: PackedExperts, routing: Routing) -> torch.Tensor: ...
    def combine_experts(
        self,
        parts: torch.Tensor,
        routing: Routing,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor: ...
    def sample(self, logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor: ...
    def mark_seen(
        self, seen: torch.Tensor, slot: int | torch.Tensor, ids: torch.Tensor, bit: int
    ) -> None: ...
    def prepare_plan(self, plan: Any, shared: Any) -> Any: ...


# Index 0 serves CPU tensors, index 1 CUDA tensors: `_selected[x.is_cuda]` is the whole dispatch.
_selected: list[Ops | None] = [None, None]
_forced: str | None = None
_modules: dict[str, Ops] = {}
_warned_native = False


def ops_for(is_cuda: bool) -> Ops:
    """The implementation for CPU (False) or CUDA (True) tensors; resolved once, then a list look-up."""
    return _selected[is_cuda] or _resolve(is_cuda)


def ops_named(name: str) -> Ops:
    """The implementation module with this name; raises ValueError if it cannot run on this machine."""
    module = _modules.get(name)
    if module is None:
        package = {"torch": "torch_ops", "triton": "triton_ops", "native": "native"}[name]
        module = _modules[name] = cast(Ops, importlib.import_module(f"{__package__}.{package}"))
    return module


def backend_for(device: torch.device) -> str:
    """Name of the implementation that serves ``device``: "triton", "native" or "torch".

    Raises ValueError for a device that is neither CPU nor CUDA (unless torch is forced), for an unknown
    ``ALLSPARK_KERNELS``, and for a forced implementation that this machine or device cannot run.
    """
    name = _forced or os.environ.get(ENV) or ""
    if name:
        _check_forced(name, device)
        return name
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(f"device {device} needs the package triton: install it, or set {ENV}=torch")
        return "triton"
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device}; use cpu or cuda:N, or set {ENV}=torch")
    return "native" if _native_available() else "torch"


def compute_dtype(device: torch.device, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of activations: float32 on CPU, the model's own dtype on CUDA.

    Raises ValueError if ``model_dtype`` is not float32, bfloat16 or float16.
    """
    if model_dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"model dtype {model_dtype} is not supported; convert to float32, bfloat16 or float16"
        )
    return model_dtype if device.type == "cuda" else torch.float32


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one implementation for every device inside the block (for tests; not thread-safe)."""
    global _forced
    before = _forced
    _check_forced(name, None)
    _forced = name
    _selected[:] = [None, None]
    try:
        yield
    finally:
        _forced = before
        _selected[:] = [None, None]


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1), hence on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _resolve(is_cuda: bool) -> Ops:
    ops = ops_named(backend_for(torch.device("cuda" if is_cuda else "cpu")))
    _selected[is_cuda] = ops
    return ops


def _check_forced(name: str, device: torch.device | None) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{ENV}={name!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if name == "native":
        if device is not None and device.type != "cpu":
            raise ValueError(f"{ENV}=native serves only the CPU, not {device}")
        if not _native_available():
            raise ValueError(
                f"{ENV}=native, but the native library is missing or this CPU lacks AVX2; reinstall"
            )
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(f"{ENV}=triton, but the package triton is not installed")
        if device is not None and device.type == "cpu" and not interpreting():
            raise ValueError(f"{ENV}=triton cannot run on the CPU except with TRITON_INTERPRET=1")


def _native_available() -> bool:
    global _warned_native
    try:
        native = importlib.import_module(f"{__package__}.native")
        reason = "it was not built for this CPU"
        if native.available():
            return True
    except (ImportError, OSError, AttributeError) as error:
        reason = str(error)
    if not _warned_native:
        _warned_native = True
        logger.warning("native CPU kernels unavailable (%s): using PyTorch, which is slower", reason)
    return False
