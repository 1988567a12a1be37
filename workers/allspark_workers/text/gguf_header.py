"""The key-value header of a GGUF file, read straight from a memory map.

Layout (GGUF versions 2 and 3, little-endian): magic ``GGUF``, u32 version, u64 number of tensors, u64 number
of pairs, then the pairs: string key, u32 type, value. A string is u64 length and UTF-8 bytes; an array is
u32 item type, u64 count, items. Read this way, a large vocabulary takes a fraction of a second.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from allspark_workers.text.errors import TextError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 8
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_header(path: Path) -> dict[str, Any]:
    """All pairs of the file's header; raises ``TextError`` if it is not a GGUF file of a known version."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).pairs()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, IndexError) as error:
        if isinstance(error, TextError):
            raise
        raise TextError(f"{path} is not a complete GGUF file: {error}") from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def pairs(self) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise TextError(f"{self._path} is not a GGUF file")
        self._at = 4
        version = self._u32()
        if version not in _VERSIONS:
            raise TextError(f"{self._path} has GGUF version {version}; known are 2 and 3")
        self._u64()  # number of tensors
        return {self._string(): self._value(self._u32()) for _ in range(self._u64())}

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            if depth >= _MAX_NESTING:
                raise TextError(f"{self._path}: arrays are nested more than {_MAX_NESTING} deep")
            item, count = self._u32(), self._u64()
            if item in _SCALARS:
                return list(self._unpack(f"<{count}{_SCALARS[item]}"))
            return [self._value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise TextError(f"{self._path}: unknown value type {kind} in the header")
        return self._unpack("<" + _SCALARS[kind])[0]

    def _string(self) -> str:
        length = self._u64()
        start = self._at
        if start + length > len(self._data):
            raise TextError(f"{self._path} is truncated")
        self._at = start + length
        return self._data[start : self._at].decode("utf-8", "replace")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._data, self._at)
        self._at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._data, self._at)
        self._at += 8
        return int(value)
