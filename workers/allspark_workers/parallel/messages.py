"""What rank 0 tells the other ranks, over the pipe to their standard input; an end of file means: leave.

A frame is its length (4 bytes, little-endian) and a msgpack map. Arrays travel as their bytes.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import IO, Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from allspark_workers.engine.batch import RaggedBatch
from allspark_workers.engine.embeddings import GivenEmbeddings

_LENGTH = struct.Struct("<I")


def write(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Send one message; blocks while the pipe is full."""
    body = msgpack.packb(message)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read(stream: IO[bytes]) -> dict[str, Any] | None:
    """The next message; None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(head)[0])
    message: dict[str, Any] = msgpack.unpackb(body)
    return message


def pack_batch(batch: RaggedBatch) -> dict[str, Any]:
    """A step's batch as a message."""
    return {field.name: _pack(getattr(batch, field.name)) for field in fields(batch)}


def unpack_batch(message: dict[str, Any]) -> RaggedBatch:
    """The batch that `pack_batch` packed."""
    return RaggedBatch(**{name: _unpack(packed) for name, packed in message.items()})


def pack_given(given: GivenEmbeddings) -> list[Any]:
    """A step's given embeddings as a message."""
    return [[at, _pack(values)] for at, values in given]


def unpack_given(message: list[Any]) -> GivenEmbeddings:
    """What `pack_given` packed."""
    return [(at, _unpack(values)) for at, values in message]


def _pack(array: NDArray[Any]) -> list[Any]:
    return [array.dtype.str, array.shape, array.tobytes()]


def _unpack(packed: list[Any]) -> NDArray[Any]:
    kind, shape, data = packed
    return np.frombuffer(bytearray(data), np.dtype(kind)).reshape(shape)
