"""Linear layers: weights packed into panels once, then out = x W^T + b."""

import ctypes
import weakref

import torch

from ..types import PackedLinear
from . import library
from .library import I64, PTR

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# From about a millisecond of work the interpreter lock is given up.
LONG_CALL_BYTES = 8 << 20
LONG_CALL_FLOPS = 100_000_000


class _Header(ctypes.Structure):
    """Mirror of ``struct linear`` in linear.h."""

    _fields_ = (("n", I64), ("k", I64), ("dtype", I64), ("panels", PTR), ("bias", PTR), ("rounds", I64))


class Layout:
    """A packed weight in the library's own memory; ``address`` is what its functions take."""

    __slots__ = ("__weakref__", "address", "bias", "block", "header", "is_quantised", "long_rows", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rounds_inputs: bool) -> None:
        lib = library.current.freed
        n, k = weight.shape
        code = DTYPE_CODES[weight.dtype]
        self.nbytes: int = lib.ask_linear_bytes(n, k, code)
        block = lib.ask_arena_alloc(self.nbytes)
        if not block:
            raise MemoryError(f"no memory for a packed weight of {self.nbytes} bytes")
        weakref.finalize(self, lib.ask_arena_free, block)
        self.block: int = block
        # Whole panels are read, so the bias is padded to their width.
        self.bias = None if bias is None else _padded(bias)
        bias_at = None if self.bias is None else self.bias.data_ptr()
        self.header = _Header(n, k, code, block, bias_at, rounds_inputs)
        self.address = ctypes.addressof(self.header)
        self.long_rows = 1 if self.nbytes > LONG_CALL_BYTES else LONG_CALL_FLOPS // (2 * n * k) + 1
        self.is_quantised = False
        lib.ask_linear_pack(self.address, weight.data_ptr())


def _padded(bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(bias.detach().float(), (0, -len(bias) % 32))


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None, rounds_inputs: bool) -> PackedLinear:
    """Copy weight [N, K] into panels of 32 output columns; bias [N] is kept in float32."""
    if weight.device.type != "cpu":
        raise ValueError(f"native kernels pack CPU tensors, not {weight.device}")
    layout = Layout(weight.detach().contiguous(), bias, rounds_inputs)
    return PackedLinear(
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        dtype=weight.dtype,
        device=weight.device,
        nbytes=layout.nbytes + (0 if layout.bias is None else layout.bias.nbytes),
        backend="native",
        layout=layout,
        bias=layout.bias,
        unpacker=_unpack,
    )


def _unpack(packed: PackedLinear) -> torch.Tensor:
    weight = torch.empty((packed.out_features, packed.in_features), dtype=packed.dtype)
    library.current.freed.ask_linear_unpack(packed.layout.address, weight.data_ptr())
    return weight


def linear(x: torch.Tensor, w: PackedLinear, out: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] float32 -> [T, N] float32; each element is one sum of a fixed order, starting at the bias."""
    rows = x.shape[0]
    if out is None:
        out = torch.empty((rows, w.out_features), dtype=torch.float32)
    if x.dtype is not torch.float32 or out.dtype is not torch.float32:
        raise ValueError(f"activations on the CPU are float32, not {x.dtype} and {out.dtype}")
    layout = w.layout  # Layout or QuantisedLayout
    lib = library.current
    calls = lib.freed if rows >= layout.long_rows else lib.held
    run = calls.ask_qlinear if layout.is_quantised else calls.ask_linear
    if run(layout.address, x.data_ptr(), rows, out.data_ptr()):
        raise MemoryError(f"no memory for {rows} rows of {w.in_features} activations")
    return out
