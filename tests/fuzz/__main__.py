"""Fuzzes for a time: `python -m tests.fuzz --seconds 600 [TARGET ...]`; `make fuzz` is short for it.

Each target is fuzzed with one seed after another until its time is over, two targets at once. A finding is
printed with the command that repeats it, and the other targets go on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
#: Times the examples of `make test`: a batch takes up to a minute, and the next one has the next seed.
SCALE = 4


def fuzz(target: str, first_seed: int, seconds: float) -> bool:
    """Whether nothing was found. The batch that is running when the time is over is finished."""
    file, part = TARGETS[target]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"{FOLDER}/{file}"]
    command += ["-k", part] if part else []
    limit_s = time.monotonic() + seconds
    for seed in itertools.count(first_seed):
        variables = {"ALLSPARK_FUZZ_SCALE": str(SCALE), "ALLSPARK_FUZZ_SEED": str(seed)}
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            settings = " ".join(f"{name}={value}" for name, value in variables.items())
            print(
                f"{target}: seed {seed} found something\n{done.stdout}{done.stderr}\n"
                f"Again: {settings} {shlex.join(command)}",
                flush=True,
            )
            return False
        if time.monotonic() >= limit_s:
            break
    print(f"{target}: nothing found with seeds {first_seed} to {seed} in {seconds:g} s", flush=True)
    return True


def main() -> int:
    """1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzes for a time.")
    parser.add_argument("--seconds", type=float, default=30, help="for each target (default: 30)")
    parser.add_argument(
        "targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=", ".join(TARGETS)
    )
    parser.add_argument("--seed", type=int, help="the first one (default: a new one each time)")
    parser.add_argument("--at-once", type=int, default=2, help="targets (default: 2)")
    given = parser.parse_args()
    first_seed = random.SystemRandom().getrandbits(31) if given.seed is None else given.seed
    with ThreadPoolExecutor(given.at_once) as pool:
        results = pool.map(lambda target: fuzz(target, first_seed, given.seconds), given.targets or TARGETS)
        return 0 if all(list(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
