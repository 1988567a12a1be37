"""Everything that needs a GPU, in one command: tests on the device, speed of kernels and engine, a report.

    python benchmarks/gpu_session.py [--out build/gpu] [--seconds 540] [--parts machine,kernel-tests,...]

Parts run in this order, each in a process of its own, until the time is over; what did not run, or was cut
off, is named in the report. Nothing is fetched: a part whose packages are missing says which. Writes gpu.json
(all figures), gpu.md (the same for people) and each part's output. The exit status is 1 if any part failed.

    machine         the device, and its measured bandwidth and matrix speed: the ceilings of everything else
    kernel-tests    tests/kernels on the device
    kernels         each kernel beside PyTorch's own
    engine-tests    the engine on the device
    small, large    the engine beside transformers: models of random weights in the shapes of Qwen2.5 0.5B, 7B
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("proto", "bus", "gateway", "broker", "workers", "kernels", "client")
# What a part imports beyond torch, triton and numpy.
ENGINE_NEEDS = ("llguidance", "gguf", "safetensors", "regex", "tokenizers", "transformers")
MACHINE = """
import json, platform, sys, torch, triton
from triton.testing import do_bench
facts = torch.cuda.get_device_properties(0)
a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
b = torch.empty_like(a)
x, y = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
print("RESULT " + json.dumps({
    "device": facts.name, "capability": [facts.major, facts.minor], "processors": facts.multi_processor_count,
    "memory_gib": round(facts.total_memory / 2**30, 1), "python": platform.python_version(),
    "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
    "copy_gb_per_s": round(2 * a.nbytes / do_bench(lambda: b.copy_(a)) / 1e6),
    "bf16_tflop_per_s": round(2 * 8192**3 / do_bench(lambda: x @ y) / 1e9),
}))
"""


@dataclass
class Part:
    """One part of the session: its commands, run one after the other, and what came of them."""

    name: str
    commands: list[list[str]]
    limit: float  # seconds
    needs: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)
    summary: str = ""


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def pytest(path: str, processes: int) -> list[str]:
    """The tests that are marked `gpu`, without the fixtures of the other areas and what those need."""
    directory = "/".join(path.split("/")[:2])
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--confcutdir={directory}"]
    # Not those of the project: they name plugins that may be missing here.
    options += ["-o", "addopts=--import-mode=importlib --tb=short"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(processes), "--dist=worksteal"]
    return python("-m", "pytest", *options, path)


def parts_of(models: Path) -> list[Part]:
    processes = max(1, min(8, (os.cpu_count() or 1) // 2))  # of one GPU; they mostly compile
    return [
        Part("machine", [python("-c", MACHINE)], 60),
        Part("kernel-tests", [pytest("tests/kernels", processes)], 240, ("pytest",)),
        Part("kernels", [python("-m", "allspark_kernels.triton_ops.bench")], 200),
        Part("engine-tests", [pytest("tests/engine/test_gpu.py", 4)], 200, ("pytest", *ENGINE_NEEDS)),
        Part("small", comparison(models, "0.5b", (16, 128)), 200, ENGINE_NEEDS),
        Part("large", comparison(models, "7b", (16,)), 300, ENGINE_NEEDS),
    ]


def comparison(models: Path, shape: str, batches: tuple[int, ...]) -> list[list[str]]:
    """A model, then the engine and its peer with so many requests at once."""
    model = str(models / shape)
    commands = [python("benchmarks/random_model.py", shape, model, "--device", "cuda:0")]
    for at_once in batches:
        for what in ("engine", "transformers"):
            row = ["benchmarks/peer_worker.py", what, model, "--device", "cuda:0", "--at-once", str(at_once)]
            commands.append(python(*row))
    return commands


def environment() -> dict[str, str]:
    """This one, with the project's packages first and kernels compiled rather than interpreted."""
    paths = [str(ROOT / name) for name in PACKAGES]
    before = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": os.pathsep.join([*paths, *before])}


def run(part: Part, out: Path, seconds: float) -> None:
    """Run a part's commands for at most so long; what happened is noted in it."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        part.problem = "not run: needs " + ", ".join(missing)
        return
    start = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        for command in part.commands:
            left = start + seconds - time.monotonic()
            label = " ".join(command[1:4]).split("\n")[0]
            if left <= 0:
                part.problem = f"the time was over before: {label}"
                break
            status = run_command(command, log, left)
            if status is None:
                part.problem = f"cut off after {seconds:.0f} s in: {label}"
                break
            if status:
                part.problem = part.problem or f"exit status {status} of: {label}"
    part.seconds = round(time.monotonic() - start, 1)
    read_output(part, (out / f"{part.name}.log").read_text())


def run_command(command: list[str], log: Any, seconds: float) -> int | None:
    """Exit status, or None if the time was over; its output goes to `log`."""
    log.write("$ " + " ".join(command).split("\n")[0] + "\n")
    log.flush()
    streams = {"stdout": log, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), **streams, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the processes of pytest too
        process.wait()
        return None


def read_output(part: Part, text: str) -> None:
    """Collect JSON lines and the last line of a test run."""
    command: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            command = line.split()
        found = line.removeprefix("RESULT ")
        if found.startswith("{") and found.endswith("}"):
            row = json.loads(found)
            if "benchmarks/peer_worker.py" in command:
                at = command.index("benchmarks/peer_worker.py")
                row = {"row": command[at + 1], "at_once": int(command[command.index("--at-once") + 1]), **row}
            part.results.append(row)
        if re.search(r"^\W*\d+ (passed|failed|error|skipped)", line):
            part.summary = line.strip("= ")
    if part.summary and "passed" not in part.summary:
        part.problem = part.problem or "no test ran"


def markdown(parts: list[Part]) -> str:
    """The report."""
    lines = ["# A session with a GPU", "", "| part | seconds | outcome |", "|---|---|---|"]
    for part in parts:
        outcome = "; ".join(filter(None, (part.problem, part.summary))) or f"{len(part.results)} figures"
        lines.append(f"| {part.name} | {part.seconds} | {outcome} |")
    for part in parts:
        if part.results:
            names = [name for name in part.results[0] if name not in ("ids16", "t_ready")]
            lines += ["", f"## {part.name}", "", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
            lines += ["| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in part.results]
    return "\n".join(lines) + "\n"


def cell(value: Any) -> str:
    """A figure; of repetitions, the median and the range."""
    if isinstance(value, list) and value and all(isinstance(x, float) for x in value):
        ordered = sorted(value)
        return f"{ordered[len(ordered) // 2]:.1f} ({ordered[0]:.1f}-{ordered[-1]:.1f})"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def has_gpu() -> bool:
    """Asked of another process, so that this one holds no memory of the device."""
    command = python("-c", "import torch, sys; sys.exit(not torch.cuda.is_available())")
    return subprocess.run(command, check=False, env=environment(), capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--parts", default="", help="comma-separated; default: all")
    parser.add_argument("--models", type=Path, help="directory for the models; default: --out")
    args = parser.parse_args()
    out = args.out.resolve()
    parts = parts_of((args.models or out).resolve())
    wanted = [name for name in args.parts.split(",") if name] or [part.name for part in parts]
    if unknown := set(wanted) - {part.name for part in parts}:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}")
    if not has_gpu():
        print("there is no CUDA device for PyTorch: nothing to do")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    parts = [part for part in parts if part.name in wanted]
    for part in parts:
        if (left := end - time.monotonic()) > 0:
            run(part, out, min(left, part.limit))
        else:
            part.problem = "not run: the time was over"
        print(f"{part.name}: {part.seconds} s {part.problem} {part.summary}", flush=True)
        report = [
            {k: v for k, v in asdict(p).items() if k not in ("commands", "needs", "limit")} for p in parts
        ]
        (out / "gpu.json").write_text(json.dumps(report, indent=1))
        (out / "gpu.md").write_text(markdown(parts))
    return int(any(part.problem for part in parts))


if __name__ == "__main__":
    sys.exit(main())
