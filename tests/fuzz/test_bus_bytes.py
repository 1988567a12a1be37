"""Stream records, frames and envelopes of any bytes: the documented error, or values of the right types."""

from __future__ import annotations

from typing import Any

import msgpack
from allspark_bus import sockets
from allspark_bus.errors import MalformedMessage
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import records
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.fuzzing import ODD, bounded_time, damaged_bytes, fuzz

RECORD = records.Record(3, 5, (7, 8, 9), 3, "stop", "done", {"text": b"abc"})
SCALARS = [*ODD, -1, 0, 1, 2**31, 2**63, -(2**63), 2**64 - 1, 0.5, float("inf"), float("nan"), b"", b"\xff"]
items = st.sampled_from([*SCALARS, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)])
values = (
    items | st.lists(items, max_size=3) | st.dictionaries(st.sampled_from(["text", ""]), items, max_size=2)
)


@st.composite
def packed_records(draw: st.DrawFn) -> bytes:
    fields: dict[Any, Any] = {
        "v": 1,
        "e": 3,
        "p": 5,
        "t": [7, 8],
        "s": 3,
        "r": "stop",
        "x": "m",
        "o": {"a": b"b"},
    }
    for key in draw(st.lists(st.sampled_from([*fields, "z", b"v", b""]), min_size=1, max_size=3)):
        if draw(st.booleans()):
            fields[key] = draw(values)
        else:
            fields.pop(key, None)
    return bytes(msgpack.packb(fields))


@fuzz(500)
@given(data=packed_records() | damaged_bytes(records.encode(RECORD)) | st.binary(max_size=40))
@example(data=records.encode(RECORD))
@example(data=msgpack.packb({"v": 1, "e": float("inf"), "p": 0}))
@example(data=msgpack.packb({"v": 1, "e": 1, "p": 0, "t": "abc"}))
@example(data=msgpack.packb({"v": 1, "e": 1, "p": -1, "t": [-1]}))
@example(data=msgpack.packb({"v": 1, "e": 1, "p": 0, "s": 3, "r": {}}))
@example(data=msgpack.packb({"v": 1, "e": 1, "p": 0, "o": {"text": "no bytes"}}))
@example(data=msgpack.packb({"v": 1, "e": 1, "p": 0, "o": [1]}))
@example(data=b"\x91" * 100_000)
@example(data=b"\xdd\xff\xff\xff\xff")
@example(data=b"\xdf\xff\xff\xff\xff")
@example(data=b"\xc6\xff\xff\xff\xff")
def test_a_stream_entry_is_a_record_or_malformed(data: bytes) -> None:
    with bounded_time():
        try:
            record = records.decode(data)
        except records.MalformedRecord as error:
            assert len(str(error)) < 10_000
            return
    if record.is_terminal or not record.reason:  # a reason is written with a status only
        assert records.decode(records.encode(record)) == record
    assert record.end >= record.position >= 0 and record.epoch >= 0
    assert all(type(token) is int and token >= 0 for token in record.tokens)
    assert isinstance(record.reason + record.message, str)
    assert all(isinstance(value, bytes) for value in record.tensors.values())


frames = st.lists(
    st.binary(max_size=9)
    | st.sampled_from([b"", sockets.HEADER, sockets.MAGIC, sockets.HEADER + b"\0", b"ALSP\x02", b"worker-1"]),
    max_size=5,
)


@fuzz(300)
@given(parts=frames)
@example(parts=[])
@example(parts=[b"id", b"", sockets.HEADER, b"payload"])
@example(parts=[b"id", b"ALSP" + bytes(1 << 20), b"payload"])
def test_frames_of_any_shape_give_a_payload_or_are_malformed(parts: list[bytes]) -> None:
    route, body = sockets.split_route(parts)
    assert route + body == parts and len(route) <= 2
    try:
        payload = sockets.payload_of(body)
    except MalformedMessage as error:
        assert len(str(error)) < 300
    else:
        assert body == [sockets.HEADER, payload]


ENVELOPE = fleet.Envelope(correlation_id="c1").SerializeToString()
HELLO = fleet.FromWorker(worker_id="w1").SerializeToString()
TO_WORKER = fleet.ToWorker(version=1, broker_id="b1").SerializeToString()


@fuzz(300)
@given(
    kind=st.sampled_from([fleet.Envelope, fleet.Reply, fleet.FromWorker, fleet.ToWorker]),
    data=st.one_of(*(damaged_bytes(valid) for valid in (ENVELOPE, HELLO, TO_WORKER)), st.binary(max_size=60)),
)
@example(kind=fleet.Envelope, data=b"\x0b" * 100_000)
@example(kind=fleet.FromWorker, data=b"\x0a\xff\xff\xff\xff\x0f")
def test_an_envelope_of_any_bytes_is_read_or_refused_by_protobuf(kind: Any, data: bytes) -> None:
    with bounded_time():
        try:
            message = kind.FromString(data)
        except DecodeError:
            return
        assert kind.FromString(message.SerializeToString()) == message or "nan" in str(message)
