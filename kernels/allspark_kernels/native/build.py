"""Compile the C sources of the native kernels with the C compiler inside the ziglang wheel.

Stands alone (standard library only): the build hook loads it by path where torch is not installed.
``python -m allspark_kernels.native.build`` rebuilds in place.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
GLIBC = "2.28"  # oldest C library the result runs on; the wheel tag repeats it

# One library per instruction set, best first; the loader takes the first that the CPU can run.
ISAS = {
    "x86_64": ("x86_64_v4", "x86_64_v3"),
    "aarch64": ("generic",),
}
# Contraction off: a multiply-add is fused only where the source says so, hence all builds agree bit for bit.
FLAGS = [
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-sanitize=undefined"),
    *("-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread", "-s"),
]


class CannotBuildError(Exception):
    """This platform or Python environment cannot compile the library; the message says why."""


def library_path(isa: str, folder: Path = HERE) -> Path:
    """Where the library for one instruction set lies."""
    return folder / f"liballspark_kernels.{isa}.so"


def build(folder: Path = HERE, force: bool = False, machine: str | None = None) -> list[Path]:
    """Compile one library per instruction set of ``machine`` (default: this one) into ``folder``.

    A library newer than every source is kept unless ``force``. Raises CannotBuildError on a platform other
    than Linux on x86-64 or aarch64, without ziglang, or if the compiler fails.
    """
    machine = machine or platform.machine()
    if sys.platform != "linux" or machine not in ISAS:
        raise CannotBuildError(f"no native kernels for {sys.platform} on {machine}; PyTorch serves instead")
    return [_compile(machine, isa, library_path(isa, folder), force) for isa in ISAS[machine]]


def _compile(machine: str, isa: str, target: Path, force: bool) -> Path:
    sources = sorted(SOURCES.glob("*.c"))
    inputs = [*sources, *SOURCES.glob("*.h"), Path(__file__)]
    if not force and target.exists() and target.stat().st_mtime > max(p.stat().st_mtime for p in inputs):
        return target
    fresh = target.with_suffix(f".{os.getpid()}.tmp")
    where = ["-target", f"{machine}-linux-gnu.{GLIBC}", f"-mcpu={isa}"]
    command = [sys.executable, "-m", "ziglang", "cc", *where, *FLAGS, *map(str, sources), "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        raise CannotBuildError(f"compiling the native kernels for {isa} failed:\n{done.stderr.strip()}")
    fresh.replace(target)
    return target


if __name__ == "__main__":
    try:
        for path in build(force="--force" in sys.argv[1:]):
            sys.stdout.write(f"{path}\n")
    except CannotBuildError as error:
        sys.exit(str(error))
