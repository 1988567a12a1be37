"""Load the native library that fits this CPU and describe its functions to ctypes."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .build import ISAS, library_path

I32, I64, F32, PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

# What the operating system must report for a library to run (names of /proc/cpuinfo).
CPU_FLAGS = {
    "x86_64_v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86_64_v3": {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"},
    "generic": set(),
}
CPU_FLAGS["x86_64_v4"] |= CPU_FLAGS["x86_64_v3"]

PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "ask_get_threads": (ctypes.c_int, []),
    "ask_set_threads": (None, [ctypes.c_int]),
    "ask_arena_alloc": (PTR, [I64]),
    "ask_arena_free": (None, [PTR]),
    "ask_linear_bytes": (I64, [I64, I64, I64]),
    "ask_linear_pack": (None, [PTR, PTR]),
    "ask_linear_unpack": (None, [PTR, PTR]),
    "ask_linear": (ctypes.c_int, [PTR, PTR, I64, PTR]),
    "ask_rms_norm": (None, [PTR, I64, PTR, PTR, F32, PTR, I64, I64]),
    "ask_silu_mul": (None, [PTR, PTR, I64, I64]),
    "ask_gelu_mul": (None, [PTR, PTR, I64, I64]),
    "ask_soft_cap": (None, [PTR, I64, I64, F32]),
    "ask_route_experts": (None, [PTR, I64, I64, I64, I64, PTR, PTR, PTR, PTR]),
    "ask_grouped_linear": (ctypes.c_int, [PTR, I64, PTR, PTR, PTR, I64, I64, I64, PTR, PTR, PTR, I64]),
    "ask_qlinear": (ctypes.c_int, [PTR, PTR, I64, PTR]),
    "ask_combine_experts": (None, [PTR, PTR, PTR, PTR, PTR, I64, I64, I64]),
    "ask_rotary_kv_write": (
        ctypes.c_int,
        [*[PTR] * 3, *[I64] * 3, PTR, I64, *[PTR] * 4, *[I64] * 8],
    ),
    "ask_attention_plan": (I64, [PTR]),
    "ask_paged_attention": (ctypes.c_int, [PTR, PTR, I64, PTR, PTR, I64, F32, PTR, I64, F32]),
    "ask_lora_add": (ctypes.c_int, [PTR, PTR, I64, PTR, I64, PTR, PTR, I64, PTR, I64, I64]),
    "ask_tape_run": (ctypes.c_int, [PTR, I64, PTR]),
    "ask_sample": (ctypes.c_int, [PTR]),
    "ask_evaluate_float": (None, [I64, PTR, PTR, I64]),
    "ask_evaluate_double": (None, [I64, PTR, PTR, I64]),
    "ask_mark_seen": (ctypes.c_int, [PTR, I64, I64, I64, PTR, PTR, I64, I64]),
}


class NativeUnavailableError(ImportError):
    """No native library can run here; the message says why."""


class Library:
    """The functions of one library, in two forms.

    ``held`` keeps the interpreter lock: right for calls of microseconds, since a thread that gives the
    lock up may wait 5 ms for its return. ``freed`` gives it up: right for calls of milliseconds.
    """

    def __init__(self, isa: str) -> None:
        path = str(library_path(isa))
        self.isa = isa
        self.held = _with_prototypes(ctypes.PyDLL(path))
        self.freed = _with_prototypes(ctypes.CDLL(path))


def _with_prototypes(handle: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(handle, name)
        except AttributeError as error:
            raise NativeUnavailableError(
                f"its build is older than the package ({name} is missing); "
                "run python -m allspark_kernels.native.build"
            ) from error
        function.restype, function.argtypes = result, arguments
    return handle


def runnable_isas() -> list[str]:
    """Instruction sets that this CPU has and a library was built for, best first."""
    flags = _cpu_flags()
    names = ISAS.get(platform.machine(), ())
    return [isa for isa in names if CPU_FLAGS[isa] <= flags and library_path(isa).exists()]


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _load_best() -> Library:
    isas = runnable_isas()
    if isas:
        return Library(isas[0])
    built = [isa for isa in ISAS.get(platform.machine(), ()) if library_path(isa).exists()]
    if built:
        raise NativeUnavailableError("this CPU lacks AVX2 and FMA")
    raise NativeUnavailableError(
        "it is not built; reinstall the package or run python -m allspark_kernels.native.build"
    )


current = _load_best()


@contextmanager
def use_isa(isa: str) -> Iterator[Library]:
    """Run every operation with the library for one instruction set inside the block (for tests)."""
    global current
    before, current = current, Library(isa)
    try:
        yield current
    finally:
        current = before
