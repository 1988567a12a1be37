"""Fixtures of the kernel tests.

Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before triton is
imported; with one, the same tests run on the device.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))

import allspark_kernels as kernels
from kernel_helpers import Place

PLACES = [
    Place("torch", "cpu"),
    Place("interpreter", "cpu"),
    pytest.param(Place("triton", "cuda"), marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An implementation and its device, chosen for the whole test."""
    chosen: Place = request.param
    if chosen.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if chosen.name == "interpreter" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is not active in a process that has a GPU")
    with kernels.use_backend("torch" if chosen.name == "torch" else "triton"):
        yield chosen


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every tensor from torch.empty with NaN, so that a value nobody wrote shows."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def filled(*args: Any, original: Any = original, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(113)

        monkeypatch.setattr(torch, name, filled)
