"""The ahead-of-time checker: every kernel compiles for every target; and it does find what it looks for.

It runs in subprocesses, because this process may hold Triton's interpreter in place of the compiler.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from allspark_kernels import aot

KERNELS = {
    "rms_norm",
    "rotary_kv_write",
    "rotary_kv_write_int8",
    "rotary_kv_write_uint4",
    "silu_mul",
    "gelu_mul",
    "soft_cap",
    "route",
    "grouped_linear",
    "combine",
    "linear",
    "linear_reduce",
    "lora_shrink",
    "lora_expand",
    "decode_split",
    "decode_split_int8",
    "decode_split_uint4",
    "decode_merge",
    "prefill",
    "prefill_int8",
    "prefill_uint4",
    "penalty",
    "ban",
    "mark_seen",
    "select",
}


def run_python(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_every_kernel_compiles_without_spills(tmp_path: Path) -> None:
    result = run_python(tmp_path, "-m", "allspark_kernels.aot", "--brief")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.endswith(" ok")]
    found = {(line.split()[0], re.split(r"[\[ ]", line.split()[1])[0]) for line in lines}
    assert found == {(target, kernel) for target in aot.TARGETS for kernel in KERNELS}
    for kernel in ("prefill", "linear"):
        (line,) = (line for line in lines if re.match(rf"sm_90\s+{kernel}\[", line))
        assert "wgmma.mma_async" in line, f"{kernel} does not use the warp-group product: {line}"


# Kernels that are broken on purpose: name, target, changes of the launch, changes of the target, problem.
ONE_WARP = {"num_warps": 1, "constants": {"DIM": 256, "DIM_BLOCK": 256, "BLOCK": 128}}
BROKEN = (
    ("decode_merge", "sm_90", ONE_WARP, {}, "spills"),
    ("decode_merge", "gfx942", ONE_WARP, {}, "spills"),
    ("silu_mul", "sm_80", {"is_matrix_product": True}, {}, "does not use tensor cores"),
    ("decode_merge", "sm_80", {}, {"shared_limit_bytes": 100}, "of 100 bytes of shared memory"),
    ("silu_mul", "sm_90", {"constants": {"BLOCK": 1000}}, {}, "does not compile"),
)
CHECK_BROKEN = """
import dataclasses, json, sys
from allspark_kernels import aot

variants = aot._variants
for name, target_name, changes, target_changes, _ in json.loads(sys.argv[1]):
    variant = next(v for v in variants(target_name) if v.name.startswith(name))
    changes["constants"] = {**variant.constants, **changes.get("constants", {})}
    broken = dataclasses.replace(variant, **changes)
    aot._variants = lambda arch: [broken]
    target = dataclasses.replace(aot.TARGETS[target_name], **target_changes)
    print(aot.check(0, target).problem.replace(chr(10), " "))
"""


@pytest.mark.slow
def test_checker_finds_what_it_looks_for(tmp_path: Path) -> None:
    result = run_python(tmp_path, "-c", CHECK_BROKEN, json.dumps(BROKEN))
    problems = result.stdout.splitlines()
    assert len(problems) == len(BROKEN), result.stdout + result.stderr
    for (name, *_, expected), problem in zip(BROKEN, problems, strict=True):
        assert expected in problem, f"{name}: {problem!r}"


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as unknown:
        aot.main(["--target", "sm_1"])
    assert unknown.value.code == 2
    assert "unknown target sm_1" in capsys.readouterr().err


def test_nothing_to_compile_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert aot.main(["--match", "no such kernel"]) == 1
