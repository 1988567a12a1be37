"""Messages that consist of too many parts are told by their bytes; legal ones of any size are not."""

import asyncio
import contextlib

import pytest
from allspark_bus import broker_client, wire_shape
from allspark_bus.broker_client import BrokerClient
from allspark_bus.errors import BrokerUnavailable, Denied, LimitError, MalformedMessage
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from hypothesis import given
from hypothesis import strategies as st

EMPTY_WORD = b"\x0a\x00"
MANY = wire_shape.MAX_PARTS + 1


def message(field: int, content: bytes) -> bytes:
    """One field with a length."""
    size, length = len(content), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([field << 3 | 2]) + length + bytes([size]) + content


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(message(6, message(2, EMPTY_WORD * MANY)), id="empty stop words"),
        pytest.param(message(6, message(1, message(1, b"\x0a\x00" * MANY * 8))), id="a word without end"),
        pytest.param(message(6, b"\xda\x01" + message(0, b"\x01" * (9 << 20))[1:]), id="seeds"),
        pytest.param(message(6, b"\x18\x01" * MANY), id="the same flag again and again"),
        pytest.param(message(6, b"") * MANY, id="configurations"),
        pytest.param(message(4, message(1, b"") * MANY), id="tensors"),
        pytest.param(
            message(4, message(1, message(2, message(2, b"\x08\x01" * (5 << 20))))), id="dimensions"
        ),
    ],
)
def test_a_message_of_nothing_but_parts_is_refused(hostile: bytes) -> None:
    with pytest.raises(LimitError):
        wire_shape.check_request(hostile)
    envelope = fleet.Envelope(version=1).SerializeToString() + message(10, hostile)
    with pytest.raises(LimitError):
        wire_shape.check_envelope(envelope)


def test_legal_requests_of_any_size_pass() -> None:
    big_tensor = pb.StartRequestRequest(model_name="m")
    big_tensor.inputs.tensor_map["x"].data = bytes(60 << 20)
    words = pb.StartRequestRequest()
    for array in (words.config.stop_words_ids, words.config.bad_words_ids):
        for _ in range(1024):
            array.ids.add(word=[150_000] * 1024)
    vocabulary = pb.StartRequestRequest()
    for index in range(262_144):
        vocabulary.config.vocab[f"<{index}>"] = index
    vocabulary.config.response_format["json_schema"] = "x" * (1 << 20)
    for request in (big_tensor, words, vocabulary):
        assert request.ByteSize() > wire_shape.SMALL_BYTES
        wire_shape.check_request(request.SerializeToString())
        wire_shape.check_envelope(fleet.Envelope(start_request=request).SerializeToString())


def test_what_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_shape, "SMALL_BYTES", 0)
    for damaged in (b"\x32\x05\x00", b"\x33" + b"\x0a\x00" * 3 + b"\x34", b"\xff" * 20, b"\x30"):
        with pytest.raises(MalformedMessage):
            wire_shape.check_request(damaged)


@given(st.binary(max_size=64))
def test_any_bytes_are_counted_or_refused(data: bytes) -> None:
    patch = pytest.MonkeyPatch()
    with patch.context() as p:
        p.setattr(wire_shape, "SMALL_BYTES", 0)
        for check in (wire_shape.check_request, wire_shape.check_envelope):
            with contextlib.suppress(LimitError, MalformedMessage):
                check(data)
    assert isinstance(wire_shape.correlation_id(data), str)


def test_the_correlation_id_of_a_refused_envelope_is_found() -> None:
    envelope = fleet.Envelope(version=1, correlation_id="abc", start_request=pb.StartRequestRequest())
    assert wire_shape.correlation_id(envelope.SerializeToString()) == "abc"
    envelope.correlation_id = "a" * 65
    assert wire_shape.correlation_id(envelope.SerializeToString()) == ""


async def test_a_call_that_no_broker_would_read_is_not_sent() -> None:
    client = BrokerClient(["tcp://127.0.0.1:9"], max_message_bytes=1000)
    try:
        request = pb.StartRequestRequest(model_name="x" * 6000)
        with pytest.raises(LimitError, match="the limit is"):
            await client.call(fleet.Envelope(start_request=request), 20)
    finally:
        await client.close()


async def test_large_calls_that_wait_are_bounded_by_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_client, "MAX_LARGE_BYTES", 3 * broker_client.LARGE_BYTES)
    client = BrokerClient(["tcp://127.0.0.1:9"])  # nobody answers there
    large = pb.StartRequestRequest(model_name="x" * broker_client.LARGE_BYTES)

    async def waits(request: pb.StartRequestRequest) -> bool:
        try:
            await client.call(fleet.Envelope(start_request=request), 0.5)
        except (BrokerUnavailable, Denied) as e:
            return isinstance(e, BrokerUnavailable)
        raise AssertionError("nobody answers")

    try:
        small = pb.StartRequestRequest(model_name="m")
        found = await asyncio.gather(waits(large), waits(large), waits(large), waits(small))
        assert found == [True, True, False, True]
        assert await waits(large), "those before are over"
    finally:
        await client.close()
