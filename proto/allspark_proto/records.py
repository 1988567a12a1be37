"""The records of a request's Redis stream: what a worker writes, what gateways and direct readers read.

An entry has one field, `m`: a msgpack map (docs/wire-protocol.md, "Stream records"). The entry id is
`<tokens generated up to and including this entry>-<0, or 1 for the terminal entry>`, so the length and
the status of a request are the id of its last entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

VERSION = 1
FIELD = b"m"

FINISHED = 3
INTERRUPTED = 4


class MalformedRecord(ValueError):
    """A stream entry that is not a record of this protocol."""


@dataclass(frozen=True, slots=True)
class Record:
    """One stream entry: tokens `[position, position + len(tokens))` of the generated sequence."""

    epoch: int
    position: int
    tokens: tuple[int, ...] = ()
    status: int = 0  # GENERATE_STATUS, only in the terminal record
    reason: str = ""
    message: str = ""
    tensors: Mapping[str, bytes] = field(default_factory=dict)  # name -> serialised allspark Tensor

    @property
    def is_terminal(self) -> bool:
        return self.status != 0

    @property
    def end(self) -> int:
        """Tokens generated up to and including this record."""
        return self.position + len(self.tokens)


def encode(record: Record) -> bytes:
    """Packs a record; absent keys mean empty."""
    m: dict[str, Any] = {"v": VERSION, "e": record.epoch, "p": record.position}
    if record.tokens:
        m["t"] = record.tokens
    if record.status:
        m["s"], m["r"] = record.status, record.reason
    if record.message:
        m["x"] = record.message
    if record.tensors:
        m["o"] = dict(record.tensors)
    packed: bytes = msgpack.packb(m)
    return packed


def decode(data: bytes) -> Record:
    """Unpacks a record.

    Raises MalformedRecord for bytes that are not one, or of an unknown version.
    """
    try:
        m = msgpack.unpackb(data, strict_map_key=True, max_map_len=4096)
        if m["v"] != VERSION:
            raise MalformedRecord(f"stream record version {m['v']} is not {VERSION}")
        record = Record(
            m["e"],
            m["p"],
            tuple(m.get("t", ())),
            m.get("s", 0),
            m.get("r", ""),
            m.get("x", ""),
            m.get("o", {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as e:
        raise MalformedRecord(f"not a stream record: {e}") from e
    if not _is_well_typed(record):
        raise MalformedRecord("not a stream record: a value of the wrong type or out of range")
    return record


def _is_well_typed(record: Record) -> bool:
    """Types, and the ranges that the service's messages have: int32 for status and tokens, else int64."""
    small = (record.status, *record.tokens)
    large = (record.epoch, record.position)
    texts = (record.reason, record.message)
    return (
        all(type(number) is int and 0 <= number < 1 << 31 for number in small)
        and all(type(number) is int and 0 <= number < 1 << 63 for number in large)
        and all(isinstance(text, str) for text in texts)
        and isinstance(record.tensors, dict)
        and all(isinstance(k, str) and isinstance(v, bytes) for k, v in record.tensors.items())
    )


def tokens_of(records: Sequence[Record]) -> list[int]:
    """All tokens of consecutive records."""
    return [t for r in records for t in r.tokens]
