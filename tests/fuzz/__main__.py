"""Fuzzes for a time: `python -m tests.fuzz --seconds 600 [TARGET ...]`; `make fuzz` is short for it.

Each target is fuzzed with one seed after another until its time is over. A finding is printed with the
command that repeats it, and the next target goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/fuzz"
#: What arrives from outside -> where it is fuzzed: a file, and part of a test's name if it is not all of it.
TARGETS: dict[str, tuple[str, str]] = {
    "grpc-messages": ("test_requests.py", ""),
    "zeromq-frames": ("test_bus_bytes.py", "frames or envelope"),
    "stream-records": ("test_bus_bytes.py", "stream_entry"),
    "gguf": ("test_model_files.py", "gguf"),
    "safetensors": ("test_model_files.py", "safetensors"),
    "configurations": ("test_model_files.py", "damaged_config or adapter or tokenizer"),
    "grammars": ("test_documents.py", ""),
    "chat-templates": ("test_chat_templates.py", "gives_a_prompt"),
    "store": ("test_damaged_store.py", "harms_nobody"),
    "doors": ("test_doors.py", ""),
}
#: Times the examples of `make test`: a batch takes a minute or so, and the next one has another seed.
SCALE = 20
INTERRUPTED = 2


def fuzz(target: str, seconds: float) -> bool:
    """Whether nothing was found."""
    file, part = TARGETS[target]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"{FOLDER}/{file}"]
    command += ["-k", part] if part else []
    limit_s, num_seeds = time.monotonic() + seconds, 0
    while (left_s := limit_s - time.monotonic()) > 0:
        seed = random.SystemRandom().getrandbits(32)
        variables = {"ALLSPARK_FUZZ_SCALE": str(SCALE), "ALLSPARK_FUZZ_SEED": str(seed)}
        status, output = run(command, variables, left_s)
        num_seeds += 1
        if status not in (0, INTERRUPTED):
            settings = " ".join(f"{name}={value}" for name, value in variables.items())
            print(f"{target}: seed {seed} found something\n{output}\nAgain: {settings} {shlex.join(command)}")
            return False
    print(f"{target}: nothing found with {num_seeds} seeds in {seconds:g} s", flush=True)
    return True


def run(command: list[str], variables: dict[str, str], seconds: float) -> tuple[int, str]:
    """Status and output; the time ends the run as Ctrl-C would."""
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate()
            return INTERRUPTED, ""
        return process.returncode, output.decode("utf-8", "replace")


def main() -> int:
    """1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzes for a time.")
    parser.add_argument("--seconds", type=float, default=30, help="for each target (default: 30)")
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=", ".join(TARGETS)
    )
    given = parser.parse_args()
    results = [fuzz(target, given.seconds) for target in given.targets or TARGETS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
