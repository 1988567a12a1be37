"""Weights of a Hugging Face directory: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from allspark_workers.engine.errors import ModelIOError, UnsupportedModelError
from allspark_workers.files import read_text

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class SafetensorsSource:
    """Reads tensors lazily; the files stay mapped until the source is dropped."""

    def __init__(self, directory: Path) -> None:
        self.location = str(directory)
        self.paths = _weight_files(directory)
        self._files: dict[str, Any] = {}
        bytes_by_dtype: Counter[str] = Counter()
        for path in self.paths:
            self._open(path, bytes_by_dtype)
        self.dtype = _own_dtype(bytes_by_dtype, directory)

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._files)

    def stored(self, name: str) -> None:
        """Nothing here is kept quantised."""

    def stored_bytes(self) -> int:
        """None of it."""
        return 0

    def get(self, name: str) -> torch.Tensor:
        """The tensor as stored; raises ModelIOError if no file has it."""
        file = self._files.get(name)
        if file is None:
            raise ModelIOError(f"{self.location} has no tensor {name}: the checkpoint is incomplete")
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelIOError(f"tensor {name} of {self.location} is unreadable: {error}") from error
        return tensor

    def _open(self, path: Path, bytes_by_dtype: Counter[str]) -> None:
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                bytes_by_dtype[part.get_dtype()] += _num_elements(part.get_shape())
                self._files[name] = file
        except FileNotFoundError as error:
            raise ModelIOError(f"weight file {path} is missing") from error
        except (SafetensorError, OSError) as error:
            raise ModelIOError(f"weight file {path} is truncated or not safetensors: {error}") from error


def _num_elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _own_dtype(counts: Counter[str], directory: Path) -> torch.dtype:
    """The dtype most weights have; anything but the three float formats is a quantisation we do not know."""
    if not counts:
        raise ModelIOError(f"the weight files in {directory} hold no tensors")
    name = counts.most_common(1)[0][0]
    if name not in _DTYPES:
        raise UnsupportedModelError(
            f"weights in {directory} are stored as {name}; known are {', '.join(_DTYPES)} (or a GGUF file)"
        )
    return _DTYPES[name]


def _weight_files(directory: Path) -> list[Path]:
    """The files of the checkpoint, in the order of the index."""
    index = directory / _INDEX
    if not index.exists():
        single = directory / _SINGLE
        if not single.is_file():
            raise ModelIOError(f"{directory} has neither {_SINGLE} nor {_INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(read_text(index, _MAX_INDEX_BYTES))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelIOError(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        # The index comes with the model: it must not lead out of the directory the caller confined us to.
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelIOError(
                f"{index} names the weight file {str(name)[:200]!r}, which is not a plain file name"
            )
        try:
            if (directory / name).exists() and not (directory / name).is_file():
                raise ModelIOError(f"{directory / name} is no regular file")
        except OSError as error:  # above all a name that is too long
            raise ModelIOError(f"{index} names the weight file {name[:200]!r}: {error.strerror}") from error
    return [directory / name for name in names]
