"""Thread policy: what is set, and when it is too late."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from allspark_workers.engine import threads

_SCRIPT = """
import os
from allspark_workers.engine.threads import apply_threads, set_environment
print(set_environment(int(os.environ["N"])), os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"])
import torch
print(apply_threads(1), torch.get_num_threads())
"""


def test_the_environment_is_set_before_torch_and_keeps_the_users_choice() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=env | {"N": "3", "OMP_WAIT_POLICY": "ACTIVE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["3", "3", "ACTIVE", "1", "1"]


def test_after_torch_it_is_too_late() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        threads.set_environment()


def test_usable_cores_respect_affinity() -> None:
    assert 1 <= threads.usable_cores() <= len(os.sched_getaffinity(0))
