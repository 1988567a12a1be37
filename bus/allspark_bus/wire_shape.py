"""How many parts a StartRequest has, counted before it is parsed.

An empty list is two bytes on the wire and fifty in memory, and every process on the way parses, copies and
writes it: a message of the largest size that consists of nothing else stops its reader for seconds, and all
other callers with it. Tensor data and texts cost what they weigh, and are not looked at.

Wire format: https://protobuf.dev/programming-guides/encoding/. Field numbers are those of the descriptors.
"""

from collections.abc import Iterator
from typing import Final

from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_bus.errors import LimitError, MalformedMessage

#: A message of this size costs nothing worth counting, whatever it consists of.
SMALL_BYTES: Final = 256 << 10
#: Twice the entries of the largest vocabulary, which clients may send with a request.
MAX_PARTS: Final = 1 << 19
#: Of everything but tensor data, texts and the vocabulary: the longest legal words have 6 MiB.
MAX_LIST_BYTES: Final = 8 << 20

MAX_CORRELATION_BYTES: Final = 64

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_REQUEST = pb.StartRequestRequest.DESCRIPTOR.fields_by_name
_CONFIG = pb.GenerateConfig.DESCRIPTOR.fields_by_name
_INPUTS, _GENERATE = _REQUEST["inputs"].number, _REQUEST["config"].number
_WORDS = frozenset({_CONFIG["bad_words_ids"].number, _CONFIG["stop_words_ids"].number})
_FREE_IN_CONFIG = frozenset({_CONFIG["vocab"].number, _CONFIG["response_format"].number})
_ENTRY_VALUE = 2  # of every map
_DATA = frozenset({pb.Tensor.DESCRIPTOR.fields_by_name["data"].number})
_START = fleet.Envelope.DESCRIPTOR.fields_by_name["start_request"].number
_CORRELATION = fleet.Envelope.DESCRIPTOR.fields_by_name["correlation_id"].number

_Span = tuple[int, int]


def check_request(message: bytes) -> None:
    """For a serialised StartRequestRequest: raises LimitError if it has more parts than any legal one.

    Raises MalformedMessage for what cannot be counted: truncated messages and groups, which nobody sends.
    """
    if len(message) > SMALL_BYTES:
        _Count(message).request((0, len(message)))


def check_envelope(message: bytes) -> None:
    """The same for a serialised Envelope that holds one."""
    if len(message) > SMALL_BYTES:
        count = _Count(message)
        for number, span in count.fields((0, len(message))):
            if number == _START:
                count.request(span)


def correlation_id(message: bytes) -> str:
    """That of a serialised Envelope which is not going to be parsed; "" if it has none that can be read."""
    try:
        for number, (start, end) in _Count(message).fields((0, len(message))):
            if number == _CORRELATION and end - start <= MAX_CORRELATION_BYTES:
                return message[start:end].decode()
    except (LimitError, MalformedMessage, UnicodeDecodeError):
        pass
    return ""


class _Count:
    """Of the parts of one message so far."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._parts = 0
        self._list_bytes = 0

    def request(self, span: _Span) -> None:
        """Counts a StartRequestRequest."""
        for number, inner in self.fields(span):
            if number == _GENERATE:
                self._config(inner)
            elif number == _INPUTS:
                self._inputs(inner)

    def fields(self, span: _Span) -> Iterator[tuple[int, _Span]]:
        """(number, where its bytes are) of the fields with a length; the others are stepped over.

        Raises LimitError beyond MAX_PARTS, MalformedMessage for what is no sequence of fields.
        """
        at, end = span
        while at < end:
            self._parts += 1
            if self._parts > MAX_PARTS:
                raise LimitError(
                    f"the request has more than {MAX_PARTS} parts: no legal prompt, vocabulary or list has"
                )
            tag, at = self._varint(at, end)
            kind = tag & 7
            if kind == _BYTES:
                length, at = self._varint(at, end)
                if at + length > end:
                    raise MalformedMessage("a field ends behind its message")
                yield tag >> 3, (at, at + length)
                at += length
            elif kind == _VARINT:
                _, at = self._varint(at, end)
            elif kind in (_FIXED32, _FIXED64):
                at += 4 if kind == _FIXED32 else 8
            else:
                raise MalformedMessage(f"wire type {kind} is not known")

    def _config(self, span: _Span) -> None:
        for number, inner in self.fields(span):
            if number in _WORDS:
                for _, word in self.fields(inner):
                    self._add(word)
            elif number not in _FREE_IN_CONFIG:
                self._add(inner)

    def _inputs(self, span: _Span) -> None:
        for _, entry in self.fields(span):
            for number, value in self.fields(entry):
                if number == _ENTRY_VALUE:
                    self._tensor(value)

    def _tensor(self, span: _Span) -> None:
        for number, inner in self.fields(span):
            if number not in _DATA:
                self._add(inner)

    def _add(self, span: _Span) -> None:
        self._list_bytes += span[1] - span[0]
        if self._list_bytes > MAX_LIST_BYTES:
            raise LimitError(
                f"the lists of the request have more than {MAX_LIST_BYTES} bytes: tensors and text excepted, "
                "no legal request has"
            )

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        message, value, shift = self._message, 0, 0
        while at < end and shift < 70:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise MalformedMessage("a number of a field does not end")
