"""The package imports and runs where nothing of the fleet is installed (a bare GPU machine)."""

import subprocess
import sys

PROGRAM = """
import sys


class Blocked:
    names = {"zmq", "redis", "grpc", "msgpack", "pydantic", "pydantic_settings", "google", "uvloop",
             "allspark", "allspark_bus", "allspark_proto", "allspark_workers", *BLOCK_MORE}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(name + " is blocked")


sys.meta_path.insert(0, Blocked())
import numpy as np
import torch
import allspark_kernels as kernels

w = kernels.pack_linear(torch.randn(96, 32))
x = kernels.rms_norm(torch.randn(3, 32), torch.ones(32), 1e-5)
q, k, v = kernels.linear(x, w).view(3, 6, 16).split([2, 2, 2], dim=1)
caches = torch.zeros(2, 1, 2, 32, 16)
step = torch.arange(3)
kernels.rotary_kv_write(q, k, v, torch.randn(9, 16), step, step, *caches)
plan = kernels.plan_attention([3], [3], np.zeros((1, 1), np.int32), 32, "cpu", 2, 2, 16)
y = kernels.paged_attention(q, *caches, plan, 0.25)
assert y.isfinite().all() and y.abs().sum() > 0
replay = kernels.capture(lambda: kernels.rms_norm(x, torch.ones(32), 1e-5), torch.device("cpu"))
replay()
assert "torch._dynamo" not in sys.modules, "torch's compiler takes seconds to import"
print("ran on", kernels.backend_for(torch.device("cpu")))
"""


def run_blocked(more: str) -> str:
    program = PROGRAM.replace("*BLOCK_MORE", more)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_queues_stores_and_the_rest_of_the_fleet() -> None:
    assert run_blocked("") in ("ran on native\n", "ran on torch\n")


def test_without_triton() -> None:
    """A CPU host needs no GPU compiler."""
    assert run_blocked('"triton"') in ("ran on native\n", "ran on torch\n")
