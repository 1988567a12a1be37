"""Parse the header of a GGUF file (versions 2 and 3, little endian): metadata and where the tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package has a reader too; it
spends seconds on the hundred thousand strings of a tokenizer, which the engine does not need, and does not
check bounds.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_DIMS: Final = 4
_KEPT_ITEMS: Final = 4096
_MAX_NESTING: Final = 8


class GGUFFormatError(ValueError):
    """The bytes are not a complete GGUF file."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: `shape` slowest dimension first; its rows as raw bytes in `data` [rows, bytes per row]."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata (arrays of strings and very long arrays are None) and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_gguf(path: Path) -> GGUFHeader:
    """Map the file and parse its header; raises OSError, GGUFFormatError if it is truncated or foreign."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise GGUFFormatError(f"only {path.stat().st_size} bytes long")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Parser(mapped).parse()
    except struct.error as error:
        raise GGUFFormatError("the header ends too early") from error
    except UnicodeDecodeError as error:
        raise GGUFFormatError("a name is not UTF-8") from error


class _Parser:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def parse(self) -> GGUFHeader:
        if self._data[:4] != _MAGIC:
            raise GGUFFormatError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise GGUFFormatError(f"GGUF version {version} (or byte order) is not supported; known: 2, 3")
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise GGUFFormatError(f"alignment {alignment}")
        start = -(-self._at // alignment) * alignment
        return GGUFHeader(metadata, {info[0]: self._tensor(start, *info) for info in infos})

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._advance(length)
        return self._data[self._at - length : self._at].decode("utf-8")

    def _advance(self, count: int) -> None:
        if self._at + count > self._size:
            raise GGUFFormatError("the header ends too early")
        self._at += count

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("<I"), self._scalar("<Q"))
        if kind not in _SCALARS:
            raise GGUFFormatError(f"value type {kind} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, length: int, depth: int = 1) -> list[Any] | None:
        if depth > _MAX_NESTING:
            raise GGUFFormatError(f"arrays are nested more than {_MAX_NESTING} deep")
        if kind == _STRING:
            data, unpack, at, size = self._data, struct.unpack_from, self._at, self._size
            for _ in range(length):
                at += 8 + unpack("<Q", data, at)[0]
                if at > size:
                    raise GGUFFormatError("the header ends too early")
            self._at = at
            return None
        if kind == _ARRAY:
            for _ in range(length):
                self._array(self._scalar("<I"), self._scalar("<Q"), depth + 1)
            return None
        if kind not in _SCALARS:
            raise GGUFFormatError(f"array type {kind} is unknown")
        code = _SCALARS[kind]
        start = self._at
        self._advance(length * struct.calcsize(code))
        if length > _KEPT_ITEMS:
            return None
        return list(struct.unpack_from(f"<{length}{code[1]}", self._data, start))

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise GGUFFormatError(f"tensor {name} has {num_dims} dimensions")
        dims = tuple(self._scalar("<Q") for _ in range(num_dims))
        return name, self._scalar("<I"), dims[::-1], self._scalar("<Q")

    def _tensor(self, start: int, name: str, kind: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError as error:
            raise GGUFFormatError(f"tensor {name} has the unknown type {kind}") from error
        block_size, block_bytes = GGML_QUANT_SIZES[quantisation]
        width, rows = shape[-1], int(np.prod(shape[:-1], dtype=object))
        if min(shape) < 1 or width % block_size:
            raise GGUFFormatError(f"tensor {name} has rows of {width}, not whole blocks of {block_size}")
        row_bytes = width // block_size * block_bytes
        at, count = start + offset, rows * row_bytes
        if at + count > self._size:
            raise GGUFFormatError(
                f"tensor {name} ends at byte {at + count}, the file has {self._size}: it is truncated"
            )
        raw = np.frombuffer(self._data, np.uint8, count, at)
        return TensorInfo(name, quantisation, shape, raw.reshape(rows, row_bytes))
