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
from allspark_kernels import native
from kernel_helpers import Place

TORCH, INTERPRETER = Place("torch", "cpu"), Place("interpreter", "cpu")
NATIVE = Place("native", "cpu")
CUDA = pytest.param(Place("triton", "cuda"), marks=pytest.mark.gpu)


def enter(place: Place) -> Iterator[Place]:
    """Choose the implementation of ``place`` for a test, or skip it with the reason."""
    if place.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if place.name == "interpreter" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is not active in a process that has a GPU")
    if place.name == "native" and not native.available():
        pytest.skip(str(native.unavailable_reason))
    with kernels.use_backend("triton" if place.name == "interpreter" else place.name):
        yield place


@pytest.fixture(params=[TORCH, INTERPRETER, CUDA], ids=lambda place: place.name)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """An implementation and its device, chosen for the whole test."""
    yield from enter(request.param)


@pytest.fixture(params=[TORCH, INTERPRETER, NATIVE, CUDA], ids=lambda place: place.name)
def sampling_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Like ``place``, and the native library too: sampling takes float32 logits everywhere."""
    yield from enter(request.param)


@pytest.fixture(params=[TORCH, INTERPRETER, NATIVE, CUDA], ids=lambda place: place.name)
def cache_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Every implementation of the KV cache; on the CPU all of them take float32 activations."""
    yield from enter(request.param)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every tensor from torch.empty with NaN, so that a value nobody wrote shows."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def filled(*args: Any, original: Any = original, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(113)

        monkeypatch.setattr(torch, name, filled)
