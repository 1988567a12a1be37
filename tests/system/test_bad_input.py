"""Bad input through the whole fleet: the right AS_STATUS, a reason, and the fleet unharmed afterwards."""

import uuid as uuid_lib

import grpc
import pytest
import zmq
from allspark.client import Client, GenerateOptions
from allspark.client.options import start_request_message
from allspark.launcher import Fleet
from allspark_bus import sockets
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import metadata
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

from tests.fleet.scripted_engine import expected_tokens

PARAM, IO, EXCEED, INVALID = 2, 3, 7, 8


def message(ids: list[int], model: str = "m", **config: object) -> pb.StartRequestRequest:
    request = start_request_message(model, ids, GenerateOptions(max_new_tokens=3), uuid_lib.uuid4().hex)
    for key, value in config.items():
        if key == "stop":
            request.config.stop_words_ids.ids.add(word=value)
        elif key == "bad":
            request.config.bad_words_ids.ids.add(word=value)
        else:
            setattr(request.config, key, value)
    return request


def tensor(request: pb.StartRequestRequest, **fields: object) -> pb.StartRequestRequest:
    for key, value in fields.items():
        if key == "dims":
            request.inputs.tensor_map["input_ids"].shape.dims[:] = value
        else:
            setattr(request.inputs.tensor_map["input_ids"], key, value)
    return request


CASES = {
    "unknown model": (message([1], "nobody"), PARAM, "unknown"),
    "model not started": (message([1], "idle"), INVALID, "not started"),
    "no inputs": (pb.StartRequestRequest(model_name="m"), PARAM, "input_ids"),
    "empty prompt": (message([], max_length=9), EXCEED, "empty"),
    "prompt over the limit": (message([1] * 511, max_length=0), EXCEED, "limit is 510"),
    "max_length below the prompt": (message([1, 2, 3], max_length=2), EXCEED, "must exceed"),
    "max_length equal to the prompt": (message([1, 2, 3], max_length=3), EXCEED, "must exceed"),
    "max_length over the limit": (message([1], max_length=513), EXCEED, "engine_max_length"),
    "negative prompt id": (message([1, -1]), PARAM, "-1"),
    "prompt id over the vocabulary": (message([1000]), PARAM, "1000"),
    "negative stop word id": (message([1], stop=[-1]), PARAM, "stop_words_ids"),
    "stop word id over the vocabulary": (message([1], stop=[1000]), PARAM, "stop_words_ids"),
    "negative bad word id": (message([1], bad=[-1]), PARAM, "bad_words_ids"),
    "bad word id over the vocabulary": (message([1], bad=[1000]), PARAM, "bad_words_ids"),
    "eos over the vocabulary": (message([1], eos_token_id=1000), PARAM, "eos_token_id"),
    "fewer bytes than the shape": (tensor(message([1, 2]), data=b"12345678"), PARAM, "needs 16 bytes"),
    "more bytes than the shape": (tensor(message([1]), data=bytes(16)), PARAM, "needs 8 bytes"),
    "negative dimension": (tensor(message([1]), dims=[1, -1]), PARAM, "negative dimension"),
    "wrong dtype": (tensor(message([1]), data_type=pb.FLOAT32), PARAM, "FLOAT32"),
    "uuid of one MiB": (message([1], uuid="u" * (1 << 20)), PARAM, "1048576 bytes"),
    "too many beams": (message([1], num_beams=9), PARAM, "num_beams"),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def idle_model(scripted_fleet: Fleet) -> None:
    with Client(scripted_fleet.addresses[:1]) as client:
        client.build_model("idle", str(scripted_fleet.options.model_roots[0] / "m.json"))


@pytest.fixture
def stub(scripted_fleet: Fleet) -> AllSparkStub:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 4 << 20)]
    return AllSparkStub(grpc.insecure_channel(scripted_fleet.addresses[0], options))


def assert_unharmed(fleet_: Fleet) -> None:
    with (
        Client(fleet_.addresses[:1]) as client,
        client.submit("m", [7, 8], GenerateOptions(max_new_tokens=12)) as request,
    ):
        assert request.result() == expected_tokens([7, 8], 12)
    assert all(p.num_starts == 1 for p in fleet_.processes.values()), "no process was restarted"


@pytest.mark.parametrize("name", CASES)
def test_bad_request(scripted_fleet: Fleet, stub: AllSparkStub, name: str) -> None:
    request, status, reason = CASES[name]
    response, call = stub.StartRequest.with_call(request)
    trailing = dict(call.trailing_metadata())
    assert response.as_status == status
    assert response.uuid == request.config.uuid or not request.config.uuid
    assert trailing[metadata.STATUS] == str(status)
    assert reason in metadata.decode_text(trailing[metadata.REASON])
    assert_unharmed(scripted_fleet)


def test_prompt_at_the_limit_is_legal(scripted_fleet: Fleet) -> None:
    with (
        Client(scripted_fleet.addresses[:1]) as client,
        client.submit("m", [1] * 510, GenerateOptions()) as request,
    ):
        assert request.result() == expected_tokens([1] * 510, 2)


def test_duplicate_uuid_with_the_same_and_with_another_body(
    scripted_fleet: Fleet, stub: AllSparkStub
) -> None:
    request = message([5, 6], uuid="twice")
    assert stub.StartRequest(request).as_status == 0
    assert stub.StartRequest(request).as_status == 0, "a retry"
    other = message([5, 7], uuid="twice")
    response, call = stub.StartRequest.with_call(other)
    assert response.as_status == PARAM
    assert "in use" in metadata.decode_text(dict(call.trailing_metadata())[metadata.REASON])
    with Client(scripted_fleet.addresses[:1]) as client:
        assert client.attach("m", "twice").result() == expected_tokens([5, 6], 3)
    assert stub.ReleaseRequest(pb.StopRequestRequest(uuid="twice")).as_status == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [("/etc/passwd", IO), ("../../etc/passwd", IO), ("missing.gguf", IO), ("", IO)],
)
def test_paths_that_must_not_be_read(
    scripted_fleet: Fleet, stub: AllSparkStub, path: str, status: int
) -> None:
    config = pb.ModelStructConfig(model_name="x", model_path=path)
    response, call = stub.BuildModelFromConfigStruct.with_call(config)
    assert response.as_status == status
    assert dict(call.trailing_metadata())[metadata.REASON]
    assert_unharmed(scripted_fleet)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"hello"], "expected the two frames"),
        ([sockets.HEADER], "expected the two frames"),
        ([b"ALSP\x02", b""], "version 02 is not known"),
        ([sockets.HEADER, b"\xff\xff\xff"], "no Envelope"),
        ([sockets.HEADER, fleet.Envelope(version=9).SerializeToString()], "version 9 is not known"),
        ([sockets.HEADER, fleet.Envelope(version=1).SerializeToString()], "no call"),
        ([sockets.HEADER, fleet.Envelope(version=1, tenant="a/b").SerializeToString()], "tenant"),
        ([sockets.HEADER, b"", b"", b""], "expected the two frames"),
    ],
)
def test_malformed_envelopes(scripted_fleet: Fleet, frames: list[bytes], reason: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(scripted_fleet.frontends[0])
        socket.send_multipart(frames)
        assert socket.poll(60_000), "every message is answered"
        header, payload = socket.recv_multipart()
    assert header == sockets.HEADER
    reply = fleet.Reply.FromString(payload)
    assert (reply.as_status, reason in reply.reason) == (PARAM, True), reply
    assert_unharmed(scripted_fleet)
