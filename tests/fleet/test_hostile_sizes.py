"""Messages of any size fail alone: the connection that brought them, and its other calls, go on."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from allspark_bus import wire_shape
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from .harness import MiniFleet

LIMIT = 2 << 20


@pytest.fixture
async def small(valkey: Any, tmp_path: Path) -> AsyncIterator[MiniFleet]:
    f = MiniFleet(valkey.url, tmp_path, f"--max-message-bytes={LIMIT}")
    yield f
    await f.close()


def start(**fields: Any) -> pb.StartRequestRequest:
    request = pb.StartRequestRequest(**fields)
    request.config.uuid = "u"
    return request


async def test_a_message_of_the_largest_size_cuts_nobody_off(small: MiniFleet) -> None:
    """The envelope around a message that a gateway has accepted is a little larger than its limit."""
    request = start(model_name="m")
    request.inputs.tensor_map["x"].data = bytes(LIMIT - request.ByteSize() - 64)
    assert (
        LIMIT - 64
        < request.ByteSize()
        <= LIMIT
        < fleet.Envelope(correlation_id="0" * 32, tenant="0" * 64, start_request=request).ByteSize()
    )
    reply = await small.call(tenant="t" * 64, start_request=request)
    assert (reply.as_status, reply.reason) == (
        pb.ALLSPARK_PARAM_ERROR,
        "model 'm' is unknown: build it first",
    )


async def test_a_name_of_a_megabyte_is_answered_in_a_few_words(small: MiniFleet) -> None:
    name = "\1" * (1 << 20)
    for call in (
        {"start_request": start(model_name=name)},
        {"stop_request": pb.StopRequestRequest(uuid="u", model_name=name)},
        {"get_engine_stat": pb.ModelName(model_name=name)},
        {"get_file_information": pb.FileInformationRequest(model_path=name)},
        {"build_model": pb.ModelStructConfig(model_name="m", model_path=name)},
    ):
        reply = await small.call(**call)
        assert reply.as_status == pb.ALLSPARK_PARAM_ERROR
        assert "the limit is 4096" in reply.reason
        assert reply.ByteSize() < 1000


async def test_a_reason_that_quotes_the_caller_is_cut(small: MiniFleet) -> None:
    request = start(model_name="\1" * 4096)
    reply = await small.call(start_request=request)
    assert reply.as_status == pb.ALLSPARK_PARAM_ERROR
    assert len(reply.reason) == 4096 + 4


async def test_an_envelope_of_nothing_but_empty_lists_is_answered_unparsed(small: MiniFleet) -> None:
    request = start(model_name="m")
    for _ in range(wire_shape.MAX_PARTS + 1):
        request.config.stop_words_ids.ids.add()
    reply = await small.call(start_request=request)
    assert reply.as_status == pb.ALLSPARK_EXCEED_LIMIT_ERROR
    assert f"more than {wire_shape.MAX_PARTS} parts" in reply.reason
