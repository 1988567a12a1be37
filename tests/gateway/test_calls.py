"""Calls that the broker answers: envelope, reply, status, reason, and what happens when nobody answers."""

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from allspark_gateway.service import DESCRIPTOR
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import metadata
from allspark_proto.version import VERSION, version_full
from google.protobuf.message_factory import GetMessageClass

from .conftest import Client, Gateways, Producer, ScriptedBroker

STATUS_CALLS = {
    "BuildModelFromConfigStruct": (pb.ModelStructConfig(model_name="m", engine_max_length=64), "build_model"),
    "StartModel": (pb.ModelName(model_name="m"), "start_model"),
    "StopModel": (pb.ModelName(model_name="m"), "stop_model"),
    "ReleaseModel": (pb.ModelName(model_name="m"), "release_model"),
    "UnloadModelFromDeviceMemory": (pb.ModelName(model_name="m"), "unload_model"),
    "ReloadModelToDeviceMemory": (pb.ModelName(model_name="m"), "reload_model"),
    "ShutdownService": (pb.Empty(), "shutdown_service"),
}
UUID_CALLS = {"StopRequest": "stop_request", "ReleaseRequest": "release_request"}
STAT = pb.AsEngineStat(model_name="m", total_span=8)
QUESTIONS = {
    "GetAsEngineStat": (pb.ModelName(model_name="m"), "get_engine_stat", {"engine_stat": STAT}, STAT),
    "GetModelInformation": (
        pb.ModelName(model_name="m"),
        "get_model_information",
        {"model_information": pb.ModelInfo(model_info="text")},
        pb.ModelInfo(model_info="text"),
    ),
    "GetOpProfilingInfo": (
        pb.ModelName(model_name="m"),
        "get_op_profiling_info",
        {"op_profiling_info": pb.OpProfilingInfo(op_profiling_info="table")},
        pb.OpProfilingInfo(op_profiling_info="table"),
    ),
    "GetFileInformation": (
        pb.FileInformationRequest(model_path="/models/m"),
        "get_file_information",
        {"file_information": pb.FileInformationResponse(create_version_graph="1.2.3")},
        pb.FileInformationResponse(create_version_graph="1.2.3"),
    ),
    "GetRankNums": (pb.Empty(), "get_rank_nums", {"rank_nums": pb.RankId(rank_id=1)}, pb.RankId(rank_id=1)),
}
DENIED = {
    "as_status": pb.ALLSPARK_REQUEST_DENIED,
    "reason": "the queue of model 'm' is full – später",
    "retry_after_ms": 250,
}


def start(uuid: str = "u", **more: Any) -> pb.StartRequestRequest:
    return pb.StartRequestRequest(model_name="m", config=pb.GenerateConfig(uuid=uuid, max_length=9), **more)


# ---- envelopes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rpc", STATUS_CALLS)
async def test_a_model_call_becomes_an_envelope(client: Client, broker: ScriptedBroker, rpc: str) -> None:
    message, call = STATUS_CALLS[rpc]
    reply, trailing = await client.call(rpc, message)
    assert reply.as_status == 0 and not trailing
    [envelope] = broker.envelopes
    assert (envelope.WhichOneof("call"), getattr(envelope, call)) == (call, message)
    assert (envelope.version, envelope.tenant, envelope.may_shutdown) == (1, "default", False)


@pytest.mark.parametrize("rpc", QUESTIONS)
async def test_a_question_is_answered_by_the_broker(client: Client, broker: ScriptedBroker, rpc: str) -> None:
    message, call, reply, expected = QUESTIONS[rpc]
    broker.answers(call, **reply)
    assert (await client.call(rpc, message))[0] == expected
    [envelope] = broker.envelopes
    assert (envelope.WhichOneof("call"), getattr(envelope, call)) == (call, message)


@pytest.mark.parametrize("rpc", UUID_CALLS)
async def test_stop_and_release_echo_the_uuid(client: Client, broker: ScriptedBroker, rpc: str) -> None:
    message = pb.StopRequestRequest(model_name="m", uuid="u")
    reply, _ = await client.call(rpc, message)
    assert (reply.as_status, reply.uuid) == (0, "u")
    assert getattr(broker.envelopes[0], UUID_CALLS[rpc]) == message


async def test_start_request_carries_the_whole_message(client: Client, broker: ScriptedBroker) -> None:
    message = start()
    message.inputs.tensor_map["input_ids"].data = b"\0" * 5_000_000  # more than grpc's default of 4 MiB
    reply, _ = await client.call("StartRequest", message)
    assert (reply.as_status, reply.uuid) == (0, "u")
    [envelope] = broker.envelopes
    assert envelope.start_request == message
    assert (envelope.deadline_unix_ms, envelope.priority) == (0, 0)


async def test_the_reply_may_name_another_uuid(client: Client, broker: ScriptedBroker) -> None:
    broker.answers("start_request", uuid="u-2")
    assert (await client.call("StartRequest", start()))[0].uuid == "u-2"


@pytest.mark.parametrize("message", [pb.StartRequestRequest(model_name="m"), start("")])
async def test_a_missing_uuid_is_made_up_once(
    client: Client, broker: ScriptedBroker, message: pb.StartRequestRequest
) -> None:
    reply, _ = await client.call("StartRequest", message)
    again, _ = await client.call("StartRequest", message)
    assert reply.uuid and again.uuid and reply.uuid != again.uuid
    assert [e.start_request.config.uuid for e in broker.envelopes] == [reply.uuid, again.uuid]


async def test_deadline_and_priority_travel_in_metadata(client: Client, broker: ScriptedBroker) -> None:
    before_ms = time.time() * 1000
    await client.call("StartRequest", start(), [(metadata.DEADLINE_MS, "60000"), (metadata.PRIORITY, "-7")])
    after_ms = time.time() * 1000
    [envelope] = broker.envelopes
    assert before_ms + 60_000 - 1 <= envelope.deadline_unix_ms <= after_ms + 60_000
    assert envelope.priority == -7


async def test_the_deadline_of_the_rpc_is_not_that_of_the_request(
    client: Client, broker: ScriptedBroker
) -> None:
    await client.call("StartRequest", start(), timeout_s=15)
    assert broker.envelopes[0].deadline_unix_ms == 0


@pytest.mark.parametrize(
    "pair",
    [
        (metadata.DEADLINE_MS, "0"),
        (metadata.DEADLINE_MS, "-5"),
        (metadata.DEADLINE_MS, "soon"),
        (metadata.DEADLINE_MS, "9" * 25),
        (metadata.PRIORITY, "101"),
        (metadata.PRIORITY, "-101"),
        (metadata.PRIORITY, "high"),
    ],
)
async def test_metadata_that_cannot_be_meant_is_a_parameter_error(
    client: Client, broker: ScriptedBroker, pair: tuple[str, str]
) -> None:
    reply, trailing = await client.call("StartRequest", start(), [pair])
    assert (reply.as_status, reply.uuid) == (pb.ALLSPARK_PARAM_ERROR, "u")
    assert pair[0] in metadata.decode_text(trailing[metadata.REASON])
    assert not broker.envelopes


async def test_only_a_listener_that_the_operator_named_may_shut_the_fleet_down(
    gateways: Gateways, broker: ScriptedBroker, tmp_path: Any
) -> None:
    admin = f"unix:{tmp_path}/admin.sock"
    gateway = await gateways.open(grpc=("127.0.0.1:0", admin), allow_shutdown=(admin,))
    for index, may_shutdown in ((0, False), (1, True)):
        await gateways.client(gateway, index).call("ShutdownService", pb.Empty())
        assert broker.envelopes[-1].may_shutdown is may_shutdown


# ---- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rpc", [m.name for m in DESCRIPTOR.methods])
async def test_every_method_is_served_and_has_the_types_of_the_contract(
    client: Client, producer: Producer, rpc: str
) -> None:
    method = DESCRIPTOR.methods_by_name[rpc]
    message = GetMessageClass(method.input_type)()
    if isinstance(message, pb.UUID):
        message.uuid = "gone"
    reply, _ = await client.call(rpc, message)
    assert type(reply) is GetMessageClass(method.output_type)


@pytest.mark.parametrize("rpc", [*STATUS_CALLS, *UUID_CALLS, "StartRequest"])
async def test_a_business_error_is_a_status_with_its_reason(
    client: Client, broker: ScriptedBroker, rpc: str
) -> None:
    broker.default = lambda _: fleet.Reply(**DENIED)
    message = STATUS_CALLS[rpc][0] if rpc in STATUS_CALLS else pb.StopRequestRequest(uuid="u")
    reply, trailing = await client.call(rpc, start() if rpc == "StartRequest" else message)
    assert reply.as_status == pb.ALLSPARK_REQUEST_DENIED
    if rpc not in STATUS_CALLS:
        assert reply.uuid == "u", "echoed on failure too"
    assert trailing == {
        metadata.STATUS: str(pb.ALLSPARK_REQUEST_DENIED),
        metadata.REASON: metadata.encode_text(DENIED["reason"]),
        metadata.RETRY_AFTER_MS: "250",
    }
    assert metadata.decode_text(trailing[metadata.REASON]) == DENIED["reason"]


@pytest.mark.parametrize(
    ("rpc", "expected"),
    [
        ("GetAsEngineStat", pb.AsEngineStat(model_name="m")),
        ("GetModelInformation", pb.ModelInfo()),
        ("GetOpProfilingInfo", pb.OpProfilingInfo()),
        ("GetFileInformation", pb.FileInformationResponse(current_version_engine=VERSION)),
        ("GetRankNums", pb.RankId()),
    ],
)
async def test_a_failed_question_has_zeros_and_the_reason(
    client: Client, broker: ScriptedBroker, rpc: str, expected: Any
) -> None:
    broker.default = lambda _: fleet.Reply(as_status=pb.ALLSPARK_RUNTIME_ERROR, reason="no worker has it")
    reply, trailing = await client.call(rpc, QUESTIONS[rpc][0])
    assert reply == expected
    assert trailing[metadata.STATUS] == str(pb.ALLSPARK_RUNTIME_ERROR)
    assert trailing[metadata.REASON] == "no worker has it"


async def test_a_remark_on_a_good_answer_arrives_too(client: Client, broker: ScriptedBroker) -> None:
    info = pb.FileInformationResponse(current_version_engine=VERSION)
    broker.answers("get_file_information", file_information=info, reason="no worker reads files")
    reply, trailing = await client.call("GetFileInformation", pb.FileInformationRequest())
    assert (reply, trailing) == (info, {metadata.REASON: "no worker reads files"})


@pytest.mark.parametrize("reason", ["x" * 100_000, "ü" * 100_000, "\n\t tab and\nnewline\x00"])
async def test_any_reason_is_legal_metadata(client: Client, broker: ScriptedBroker, reason: str) -> None:
    broker.answers("start_model", as_status=pb.ALLSPARK_IO_ERROR, reason=reason)
    reply, trailing = await client.call("StartModel", pb.ModelName(model_name="m"))
    assert reply.as_status == pb.ALLSPARK_IO_ERROR
    text = metadata.decode_text(trailing[metadata.REASON])
    assert text and " ".join(reason.split()).startswith(text)


async def test_without_a_broker_a_call_is_unavailable_after_a_bounded_wait(
    gateways: Gateways, broker: ScriptedBroker
) -> None:
    broker.default = lambda _: None
    client = gateways.client(await gateways.open(call_timeout_s=0.1))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.call("StartRequest", start())
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "no answer from the broker within 0.1 s" in (error.value.details() or "")


async def test_a_broker_that_could_decide_nothing_is_unavailable_with_its_reason(
    client: Client, broker: ScriptedBroker
) -> None:
    broker.answers("start_request", as_status=1, unavailable=True, reason="Redis is unreachable")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.call("StartRequest", start())
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert error.value.details() == "Redis is unreachable"


async def test_a_lost_reply_is_repaired_by_sending_the_same_envelope_again(
    client: Client, broker: ScriptedBroker
) -> None:
    broker.default = lambda _: fleet.Reply() if len(broker.envelopes) == 2 else None
    reply, _ = await client.call("StartRequest", start(""))
    first, second = broker.envelopes
    assert first == second, "the generated uuid is the same, so the broker sees a retry"
    assert reply.uuid == first.start_request.config.uuid


async def test_without_redis_a_read_is_unavailable_after_a_bounded_wait(
    valkey: Any, gateways: Gateways
) -> None:
    client = gateways.client(await gateways.open(call_timeout_s=0.1))
    valkey.kill()
    for rpc in ("GenerateStatus", "GeneratedLength", "Get", "GetNoWait"):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.call(rpc, pb.UUID(uuid="u"))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "Redis is unreachable" in (error.value.details() or "")


async def test_parked_calls_are_answered_when_redis_stays_away(
    valkey: Any, gateways: Gateways, producer: Producer
) -> None:
    client = gateways.client(await gateways.open(call_timeout_s=5))  # enough to park them
    await producer.admit("u")
    parked = [
        asyncio.create_task(client.call("Get", pb.UUID(uuid="u"))),
        asyncio.create_task(client.call("SyncRequest", pb.StopRequestRequest(uuid="u"))),
    ]
    await producer.until_parked("u")
    valkey.kill()
    for call in parked:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_an_error_of_redis_itself_is_unavailable(client: Client, producer: Producer) -> None:
    await producer.admit("u")
    await producer.store.command("ACL", "SETUSER", "default", "-@scripting")
    try:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.get("u")
    finally:
        await producer.store.command("ACL", "SETUSER", "default", "+@scripting")
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "Redis refused a command" in (error.value.details() or "")


@pytest.mark.parametrize("rpc", ["StartRequest", "StartModel", "Get"])
async def test_a_defect_of_ours_is_answered_and_logged(
    client: Client, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch, caplog: Any, rpc: str
) -> None:
    async def defect(*_: Any) -> None:
        raise ZeroDivisionError("defect")

    monkeypatch.setattr("allspark_bus.broker_client.BrokerClient.call", defect)
    monkeypatch.setattr("allspark_bus.streams.Streams.take", defect)
    if rpc == "Get":
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.get("u")
        assert error.value.code() == grpc.StatusCode.INTERNAL
        assert "defect" in (error.value.details() or "")
    else:
        reply, trailing = await client.call(rpc, start() if rpc == "StartRequest" else pb.ModelName())
        assert reply.as_status == pb.ALLSPARK_UNKNOWN_ERROR
        assert "defect" in metadata.decode_text(trailing[metadata.REASON])
    [record] = [r for r in caplog.records if r.name == "allspark_gateway.service"]
    assert rpc in record.getMessage() and record.exc_info
    if rpc != "StartModel":
        assert "'u'" in record.getMessage()


async def test_the_bound_of_calls_in_progress(gateways: Gateways, producer: Producer) -> None:
    client = gateways.client(await gateways.open(max_calls=2))
    await producer.admit("u")
    parked = [asyncio.create_task(client.call("Get", pb.UUID(uuid="u"))) for _ in range(2)]
    await producer.until_parked("u")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        while True:  # the second Get may still be on its way
            await client.status("u")
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await producer.release("u")
    assert [reply.empty for reply, _ in await asyncio.gather(*parked)] == [1, 1]


async def test_version_and_rank(client: Client) -> None:
    version, _ = await client.call("GetVersionFull", pb.Empty())
    assert version.version_info == version_full()
    rank, _ = await client.call("GetRankId", pb.Empty())
    assert rank.rank_id == 0
