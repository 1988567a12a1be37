"""Messages that would stop the gateway for everybody are refused before they are parsed."""

import grpc
import pytest
from allspark_bus import wire_shape
from allspark_gateway.service import DESCRIPTOR
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from .conftest import Client, ScriptedBroker


async def test_a_request_of_nothing_but_empty_lists_is_refused_unparsed(
    client: Client, broker: ScriptedBroker
) -> None:
    request = pb.StartRequestRequest(model_name="m")
    request.config.uuid = "u"
    for _ in range(wire_shape.MAX_PARTS + 1):
        request.config.stop_words_ids.ids.add()
    reply, trailing = await client.call("StartRequest", request)
    assert reply.as_status == pb.ALLSPARK_EXCEED_LIMIT_ERROR
    assert f"more than {wire_shape.MAX_PARTS} parts" in metadata.decode_text(trailing[metadata.REASON])
    assert broker.envelopes == []
    assert (await client.call("StartRequest", pb.StartRequestRequest(model_name="m")))[0].as_status == 0


@pytest.mark.parametrize("rpc", ["StartRequest", "Get", "SyncRequest"])
async def test_bytes_that_are_no_message_are_refused_and_leave_no_traceback(
    client: Client, broker: ScriptedBroker, caplog: pytest.LogCaptureFixture, rpc: str
) -> None:
    call = client.channel.unary_unary(f"/{DESCRIPTOR.full_name}/{rpc}")(b"\x0a\xff\xff", timeout=20)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message is no" in (await call.details() or "")
    assert caplog.records == []
    assert broker.envelopes == []
