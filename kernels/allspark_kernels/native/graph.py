"""Decode steps recorded once and run again in one call, as a CUDA graph does on a GPU.

While the step runs for the recording, the calls into the library are noted down with their arguments, the
tensors they make come from memory that belongs to the recording, and what PyTorch itself computes is kept to
be repeated from Python.

A step over a plan from ``reserve_decode_plan`` is repeated for its live rows only: a row count that is a
multiple of the plan's rows is taken to follow it, and what belongs to padding rows is not computed.
"""

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import library
from .attention import Step
from .library import I64

# Functions of tape.c: number, and which argument is the number of rows.
FUNCTIONS = {
    "ask_linear": (0, 2),
    "ask_rms_norm": (1, 6),
    "ask_silu_mul": (2, 2),
    "ask_rotary_kv_write": (3, 14),
    "ask_paged_attention": (4, None),
    "ask_gelu_mul": (5, 2),
    "ask_soft_cap": (6, 1),
    "ask_route_experts": (7, 1),
    "ask_grouped_linear": (8, 6),
    "ask_combine_experts": (9, 5),
    "ask_qlinear": (10, 2),
}
# These compute nothing that a step could depend on.
IGNORED = {"ask_attention_plan"}
MAX_ARGUMENTS = 20
MAX_FLOATS = 2

_recording = threading.Lock()
Entry = Callable[[], object] | tuple[str, tuple[Any, ...]]


class _Call(ctypes.Structure):
    """Mirror of ``struct call`` in tape.c."""

    _fields_ = (
        *(("function", I64), ("rows_per_token", I64)),
        *(("a", I64 * MAX_ARGUMENTS), ("f", ctypes.c_double * MAX_FLOATS)),
    )


class _Memory:
    """Buffers of one recording; one whose tensor is gone serves the next of its size, in every run."""

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.Tensor]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = max(1, math.prod(shape)) * dtype.itemsize
        idle = self._idle.setdefault(size, [])
        block = idle.pop() if idle else torch.empty(size, dtype=torch.uint8)
        # The tensor's storage holds on to this array object, so its end is the end of the last view.
        lease = block.numpy()[:]
        weakref.finalize(lease, idle.append, block)
        return torch.from_numpy(lease).view(dtype)[: math.prod(shape)].view(*shape)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what a step does while it does it; sees the library's calls as a stand-in for ``Library``."""

    def __init__(self, lib: library.Library) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.isa = lib.isa
        self.lib = lib
        self.held = self.freed = _Spy(self, lib)
        self.owner = threading.get_ident()
        self.memory = _Memory()
        self.entries: list[Entry] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is ever compiled. Torch would import its whole compiler, seconds and 875 modules, to
        # mark the method below as not to be compiled.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self.memory.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        result = func(*args, **kwargs)
        inputs = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        outputs = tree_leaves(result)
        if any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments):
            self.entries.append(lambda: func(*args, **kwargs))
        elif not all(isinstance(x, torch.Tensor) for x in outputs):
            raise ValueError(f"a captured step must not read back what it computes: {func}")
        elif not all(_storage(x) in inputs for x in outputs):  # a schema cannot tell: reshape may copy
            self.entries.append(lambda: _copy(outputs, tree_leaves(func(*args, **kwargs))))
        return result


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _copy(outputs: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)


class _Spy:
    """Functions of a library that are noted down when the recording thread calls them."""

    def __init__(self, recorder: _Recorder, lib: library.Library) -> None:
        self._recorder = recorder
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._lib.held, name)
        recorder = self._recorder
        if threading.get_ident() != recorder.owner or name in IGNORED:
            return function
        if name not in FUNCTIONS:
            raise ValueError(f"{name} cannot be part of a captured step")

        def call(*args: Any) -> Any:
            recorder.entries.append((name, args))
            return function(*args)

        return call


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Run ``step`` once and return a callable that repeats it with the same tensors.

    Raises ValueError if the step reads a result back or does what cannot be repeated. Other threads may use
    the kernels meanwhile; a second capture waits.
    """
    with _recording:
        recorder = _Recorder(library.current)
        before, library.current = library.current, recorder  # type: ignore[assignment]
        try:
            with recorder:
                step()
        finally:
            library.current = before
    return _Tape(step, recorder)


class _Tape:
    """The recorded step. Library calls that follow each other are one call of ``ask_tape_run``."""

    def __init__(self, step: Callable[[], None], recorder: _Recorder) -> None:
        self._kept = (step, recorder.memory)  # what the addresses point to
        self._run = recorder.lib.freed.ask_tape_run
        self._no_plan = I64()
        self._live, tokens = ctypes.addressof(self._no_plan), 0
        plan = _plan_address(recorder.entries)
        if plan is not None:
            self._live, tokens = plan + Step.live.offset, _num_tokens(Step.from_address(plan))
        self._parts: list[Callable[[], object] | ctypes.Array[_Call]] = []
        pending: list[_Call] = []
        for entry in [*recorder.entries, None]:
            if isinstance(entry, tuple):
                pending.append(_encode(*entry, tokens))
                continue
            if pending:
                self._parts.append((_Call * len(pending))(*pending))
                pending = []
            if entry is not None:
                self._parts.append(entry)

    def __call__(self) -> None:
        for part in self._parts:
            if not isinstance(part, ctypes.Array):
                part()
            elif status := self._run(ctypes.addressof(part), len(part), self._live):
                if status == 1:
                    raise MemoryError("no scratch memory for a captured step")
                raise ValueError("a position lies outside cos_sin, or a slot outside the cache")


def _plan_address(entries: list[Entry]) -> int | None:
    addresses = {entry[1][0] for entry in entries if isinstance(entry, tuple) and "attention" in entry[0]}
    if len(addresses) > 1:
        raise ValueError("a captured step must use one attention plan")
    return addresses.pop() if addresses else None


def _num_tokens(step: Step) -> int:
    """The last of the prefix sums of the query lengths."""
    last: int = ctypes.c_int32.from_address(step.cu_q + 4 * step.requests).value
    return last


def _encode(name: str, args: tuple[Any, ...], tokens: int) -> _Call:
    function, rows_at = FUNCTIONS[name]
    call = _Call(function=function)
    floats = 0
    for i, value in enumerate(args):
        if isinstance(value, float):
            call.f[floats] = value
            floats += 1
        else:
            call.a[i] = value or 0
    if rows_at is not None and tokens and args[rows_at] % tokens == 0:
        call.rows_per_token = args[rows_at] // tokens
    return call
