"""Where weights come from: one interface over safetensors and GGUF, with Hugging Face tensor names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from allspark_kernels import QuantisedWeight

from allspark_workers.engine.errors import ModelIOError

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_HEAD_BYTES = 1 << 20


class WeightSource(Protocol):
    """A checkpoint's tensors under their Hugging Face names, such as `model.layers.0.mlp.up_proj.weight`."""

    dtype: torch.dtype
    """The dtype that "auto" means for this checkpoint."""
    location: str
    """Directory or file, for messages."""

    def names(self) -> frozenset[str]:
        """All tensor names."""

    def stored(self, name: str) -> QuantisedWeight | None:
        """The matrix as it is stored quantised; None if it is not, or in a form that kernels do not take."""

    def stored_bytes(self) -> int:
        """What the matrices occupy where those that can stay quantised do; 0 if none can."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, as stored or dequantised; raises ModelIOError if absent or unreadable."""


def digest_files(paths: Iterable[Path]) -> str:
    """Hex digest that identifies a checkpoint: sizes, first MiB (headers) and 64 samples of each file.

    Hashing gigabytes would double the load time; two fine-tunes of a model differ in the samples.
    Raises ModelIOError naming a file that cannot be read.
    """
    state = hashlib.sha256()
    for path in paths:
        try:
            _digest_file(path, state)
        except OSError as error:
            raise ModelIOError(f"cannot read {path}: {error}") from error
    return state.hexdigest()


def _digest_file(path: Path, state: hashlib._Hash) -> None:
    size = path.stat().st_size
    state.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        state.update(file.read(_HEAD_BYTES))
        for index in range(_SAMPLES):
            file.seek(size * index // _SAMPLES)
            state.update(file.read(_SAMPLE_BYTES))
