"""Compile every Triton kernel ahead of time, without a GPU, and check what came out.

    python -m allspark_kernels.aot [--target sm_80,sm_90,gfx942] [--match TEXT] [--brief] [--jobs N]

Prints registers, spills and shared memory of each kernel and target. Fails (exit status 1) on a register
spill, on more shared memory than the target has, on a kernel that does not compile, and on a matrix
kernel whose code holds no tensor-core instruction.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KIB = 1024
KERNEL_FILES = (
    "norm",
    "rotary",
    "activation",
    "linear",
    "experts",
    "lora",
    "decode_attention",
    "prefill_attention",
    "sampling",
    "selection",
)


@dataclass(frozen=True)
class Target:
    """A GPU architecture: how Triton names it, its shared memory per block, its matrix instructions."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit_bytes: int
    matrix_instruction: str


# The data centre GPUs sm_80 and sm_90 have more shared memory; their relatives sm_86, sm_89 and sm_120, which
# take the same launches, have this much (CUDA C++ Programming Guide, compute capabilities).
SHARED_BYTES = 99 * KIB

TARGETS = {
    "sm_80": Target("sm_80", "cuda", 80, 32, SHARED_BYTES, r"\bmma\.sync"),
    "sm_90": Target("sm_90", "cuda", 90, 32, SHARED_BYTES, r"\b(?:wgmma\.mma_async|mma)\.sync"),
    "gfx942": Target("gfx942", "hip", "gfx942", 64, 64 * KIB, r"\bv_mfma_"),
}


@dataclass(frozen=True)
class Report:
    """What one compilation needs per thread (registers, spilled bytes) and per block (shared memory)."""

    kernel: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    matrix_instructions: tuple[str, ...] = ()
    problem: str = ""

    def line(self) -> str:
        """One row of the table."""
        verdict = self.problem or "ok"
        matrix = ",".join(self.matrix_instructions)
        return (
            f"{self.target:7} {self.kernel:50} {self.registers:4} regs {self.spill_bytes:5} B spilled "
            f"{self.shared_bytes:7} B shared {matrix:24} {verdict}"
        )


def check(index: int, target: Target) -> Report:
    """Compile variant number ``index`` for ``target`` and judge it; a compile error becomes a problem."""
    variant = _variants(target.name)[index]
    try:
        compiled = _compile(variant, target)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises belongs in the table
        return Report(variant.name, target.name, problem=f"does not compile: {str(error).strip()[:300]}")
    text = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    used = _nvidia_usage(compiled.asm["cubin"]) if target.backend == "cuda" else _amd_usage(text)
    found = tuple(sorted(set(re.findall(target.matrix_instruction, text))))
    report = Report(variant.name, target.name, *used, int(compiled.metadata.shared), found)
    return replace(report, problem=_problem(report, variant, target))


def _problem(report: Report, variant: Any, target: Target) -> str:
    if report.spill_bytes:
        return f"spills {report.spill_bytes} bytes of registers"
    if report.shared_bytes > target.shared_limit_bytes:
        return f"needs {report.shared_bytes} of {target.shared_limit_bytes} bytes of shared memory"
    if variant.is_matrix_product and not report.matrix_instructions:
        return "does not use tensor cores"
    return ""


def _variants(arch: str) -> list[Any]:
    modules = (importlib.import_module(f"{__package__}.triton_ops.{name}") for name in KERNEL_FILES)
    return [variant for module in modules for variant in module.variants(arch)]


def _compile(variant: Any, target: Target) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in variant.types.items()
        if kind.startswith("*") or name in variant.aligned
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(
        source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options
    )


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes per thread, read from the machine code by cuobjdump."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if match is None:
        raise ValueError(f"cuobjdump printed no resource usage: {text[:200]}")
    registers, stack, local = map(int, match.groups())
    # Spilled registers live in the thread's stack frame or its local memory.
    return registers, stack + local


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers and spilled bytes per thread, from the code object's metadata."""

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if match is None:
            raise ValueError(f"code object metadata lacks {name}")
        return int(match.group(1))

    spilled = 4 * (field("vgpr_spill_count") + field("sgpr_spill_count"))
    return field("vgpr_count"), max(spilled, field("private_segment_fixed_size"))


def _work(names: Sequence[str], match: str, is_brief: bool) -> Iterator[tuple[int, Target]]:
    for name in names:
        done = set()
        for index, variant in enumerate(_variants(name)):
            kernel = variant.name.partition("[")[0]
            if match not in variant.name or (is_brief and kernel in done):
                continue
            done.add(kernel)
            yield index, TARGETS[name]


def _reports(work: Sequence[tuple[int, Target]], jobs: int) -> Iterator[Report]:
    if jobs == 1 or not work:
        yield from (check(*item) for item in work)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(check, *zip(*work, strict=True), chunksize=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m allspark_kernels.aot", description=__doc__)
    parser.add_argument("--target", default=",".join(TARGETS), help="comma-separated: " + ", ".join(TARGETS))
    parser.add_argument("--match", default="", help="only kernels whose name contains this text")
    parser.add_argument("--brief", action="store_true", help="only the first launch of each kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time")
    options = parser.parse_args(arguments)
    names = options.target.split(",")
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        parser.error(f"unknown target {', '.join(unknown)}; choose from {', '.join(TARGETS)}")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET=1 replaces the compiler; unset it")
    count = problems = 0
    work = list(_work(names, options.match, options.brief))
    for report in _reports(work, options.jobs):
        sys.stdout.write(report.line() + "\n")
        sys.stdout.flush()
        count += 1
        problems += bool(report.problem)
    sys.stdout.write(f"{count} compilations, {problems} with problems\n")
    return 1 if problems or not count else 0


if __name__ == "__main__":
    raise SystemExit(main())
