"""TLS, client certificates and tokens at a real gateway: who gets in, and as which tenant."""

import asyncio
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from allspark.certs import write_set
from allspark.certs.authority import Authority
from allspark.cli.settings import StatusSettings
from allspark.cli.status import collect
from allspark.client import Access, AccessDenied, AsyncClient, FleetUnavailable
from allspark_bus import sparse_log, watched
from allspark_gateway import guard, listeners, tokens
from allspark_gateway.guard import SCOPES
from allspark_gateway.main import Gateway
from allspark_gateway.service import DESCRIPTOR
from allspark_proto import allspark_service_pb2 as pb
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .conftest import EOS, Gateways, Producer, ScriptedBroker

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "set"
    write_set(directory, tenants=("a", "b"))
    return directory


def tls(made: Path, **more: Any) -> dict[str, Any]:
    return {"tls_cert": made / "gateway.pem", "tls_key": made / "gateway.key", **more}


def access(made: Path, token: str = "", certificate: str = "") -> Access:
    return Access.from_files(
        ca=made / "ca.pem",
        certificate=made / f"{certificate}.pem" if certificate else None,
        key=made / f"{certificate}.key" if certificate else None,
        token=made / f"{token}.token" if token else None,
    )


def connect(gateway: Gateway, how: Access) -> AsyncClient:
    return AsyncClient(gateway.listeners[0].bound, retry_s=0, timeout_s=60, access=how)


async def code_of(channel: grpc.aio.Channel, path: str, message: bytes, pairs: Sequence[Any] = ()) -> Any:
    """The gRPC status of a call, and its details."""
    call = channel.unary_unary(path)(message, metadata=tuple(pairs), timeout=60)
    return await call.code(), await call.details()


def every_call() -> list[tuple[str, bytes]]:
    """Path and a message of every method that a gateway serves."""
    calls = [(HEALTH, b"")]
    for method in DESCRIPTOR.methods:
        message = GetMessageClass(method.input_type)()
        if hasattr(message, "uuid"):
            message.uuid = "u"
        calls.append((f"/{DESCRIPTOR.full_name}/{method.name}", message.SerializeToString()))
    return calls


@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer ", "Bearer admin.wrong", "Bearer nobody.x", "Basic {token}", "{token}", "Bearer {token}x"],
)
async def test_no_call_gets_in_without_a_valid_token(
    authorization: str | None, gateways: Gateways, made: Path, broker: ScriptedBroker, producer: Producer
) -> None:
    await producer.admit("u")
    await producer.add("u", 0, 7, ending=EOS)
    gateway = await gateways.open(tokens=made / "tokens.toml")
    channel = gateways.client(gateway).channel
    token = (made / "admin.token").read_text()
    pairs = () if authorization is None else [("authorization", authorization.format(token=token))]
    for path, message in every_call():
        code, details = await code_of(channel, path, message, pairs)
        assert code is UNAUTHENTICATED, path
        assert "token" in details
        assert token not in details
    assert broker.envelopes == []


async def test_every_call_gets_in_with_a_token_that_has_both_scopes(
    gateways: Gateways, made: Path, broker: ScriptedBroker, producer: Producer
) -> None:
    await producer.admit("u")
    await producer.add("u", 0, 7, ending=EOS)
    gateway = await gateways.open(**tls(made, tokens=made / "tokens.toml"))
    how = access(made, "admin")
    async with how.aio_channel(gateway.listeners[0].bound, ()) as channel:
        for path, message in every_call():
            code, details = await code_of(channel, path, message, how.metadata())
            assert code is grpc.StatusCode.OK, f"{path}: {details}"
    assert {e.WhichOneof("call") for e in broker.envelopes} >= {"build_model", "start_request"}


async def test_a_token_without_admin_cannot_change_models(
    gateways: Gateways, made: Path, broker: ScriptedBroker
) -> None:
    gateway = await gateways.open(**tls(made, tokens=made / "tokens.toml"))
    async with connect(gateway, access(made, "a")) as client:
        changes = [name for name, scope in SCOPES.items() if scope == "admin"]
        assert len(changes) == 7
        for name in changes:
            message = GetMessageClass(DESCRIPTOR.methods_by_name[name].input_type)()
            with pytest.raises(AccessDenied, match="token a lacks the scope admin"):
                await client.call(name, message)
        assert broker.envelopes == []
        assert await client.version()
        assert (await client.submit("m", [1], uuid="x")).uuid == "x"


async def test_a_token_with_admin_alone_cannot_read_results(
    gateways: Gateways, tmp_path: Path, producer: Producer
) -> None:
    await producer.admit("u")
    file = write_tokens(tmp_path / "tokens.toml", ("ops", "default", '"admin"', ""))
    gateway = await gateways.open(tokens=file)
    channel = gateways.client(gateway).channel
    pairs = [("authorization", "Bearer ops.secret")]
    for path, message in every_call():
        expected = DENIED if SCOPES.get(path.rpartition("/")[2]) == "infer" else grpc.StatusCode.OK
        assert (await code_of(channel, path, message, pairs))[0] is expected, path


async def test_tenants_of_tokens_see_nothing_of_each_other(
    gateways: Gateways, made: Path, broker: ScriptedBroker, producer: Producer
) -> None:
    """Both have a request of the same uuid, and one has another that the other asks for."""
    for tenant, token in (("a", 1), ("b", 2)):
        await producer.admit("000", tenant)
        await producer.add("000", 0, token, tenant=tenant, ending=EOS)
    await producer.admit("of-a", "a")
    await producer.add("of-a", 0, 5, tenant="a")
    gateway = await gateways.open(**tls(made, tokens=made / "tokens.toml"))
    async with connect(gateway, access(made, "a")) as a, connect(gateway, access(made, "b")) as b:
        assert await a.attach("m", "000").result() == [1]
        assert await b.attach("m", "000").result() == [2]
        hidden = pb.UUID(uuid="of-a")
        assert (await b.call("Get", hidden))[0].empty == 1
        assert (await b.call("GetNoWait", hidden))[0].empty == 1
        assert (await b.call("GeneratedLength", hidden))[0].len == 0
        assert (await b.call("GenerateStatus", hidden))[0].status == pb.GenerateInterrupted
        reply, trailing = await b.call("SyncRequest", pb.StopRequestRequest(uuid="of-a"))
        assert reply.as_status == pb.ALLSPARK_ILLEGAL_REQUEST_ID
        unknown = (await b.call("SyncRequest", pb.StopRequestRequest(uuid="nobody's")))[1]
        assert trailing["allspark-gone"] == unknown["allspark-gone"] == "unknown"
        await b.call("SyncRequest", pb.StopRequestRequest())  # does not wait for a's, which runs
        assert (await a.call("GeneratedLength", hidden))[0].len == 1
        for name in ("StopRequest", "ReleaseRequest"):
            await b.call(name, pb.StopRequestRequest(uuid="of-a"))
    assert [(e.tenant, e.WhichOneof("call")) for e in broker.envelopes] == [
        ("b", "stop_request"),
        ("b", "release_request"),
    ]


async def test_only_a_token_that_may_stops_the_fleet(
    gateways: Gateways, tmp_path: Path, broker: ScriptedBroker
) -> None:
    rows = [("one", "default", '"admin"', ""), ("two", "default", '"admin"', "allow_shutdown = true")]
    gateway = await gateways.open(tokens=write_tokens(tmp_path / "tokens.toml", *rows))
    for name in ("one", "two"):
        client = AsyncClient(gateway.listeners[0].bound, access=Access(token=f"{name}.secret"))
        async with client:
            await client.call("ShutdownService", pb.Empty())
    assert [e.may_shutdown for e in broker.envelopes] == [False, True]


async def test_a_plain_caller_gets_nothing_from_a_tls_port(
    gateways: Gateways, made: Path, broker: ScriptedBroker
) -> None:
    gateway = await gateways.open(**tls(made))
    bound = gateway.listeners[0].bound
    token = (made / "admin.token").read_text()
    plain = gateways.client_at(bound).channel
    for path, message in every_call():
        code, _ = await code_of(plain, path, message, [("authorization", f"Bearer {token}")])
        assert code is grpc.StatusCode.UNAVAILABLE
    host, _, port = bound.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as raw:
        raw.settimeout(60)
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        received = await asyncio.to_thread(_drain, raw)
    assert len(received) <= 7, "at most a TLS alert"
    assert broker.envelopes == []


def _drain(raw: socket.socket) -> bytes:
    received = b""
    try:
        while chunk := raw.recv(4096):
            received += chunk
    except ConnectionResetError:
        pass
    return received


async def test_a_client_refuses_a_gateway_that_its_authority_did_not_sign(
    gateways: Gateways, made: Path, tmp_path: Path
) -> None:
    gateway = await gateways.open(**tls(made))
    stranger = Access(ca=Authority.new("another", 1).pair.certificate)
    async with connect(gateway, stranger) as client:
        with pytest.raises(FleetUnavailable):
            await client.version()


async def test_without_a_client_certificate_of_the_authority_no_handshake(
    gateways: Gateways, made: Path, broker: ScriptedBroker
) -> None:
    gateway = await gateways.open(**tls(made, tls_client_ca=made / "ca.pem", tokens=made / "tokens.toml"))
    foreign = Authority.new("another", 1).issue("client")
    forged = Access(
        ca=(made / "ca.pem").read_bytes(),
        certificate=foreign.certificate,
        key=foreign.key,
        token=(made / "admin.token").read_text(),
    )
    for how in (access(made, "admin"), forged):
        async with connect(gateway, how) as client:
            with pytest.raises(FleetUnavailable):
                await client.version()
    async with connect(gateway, access(made, certificate="client")) as client:
        with pytest.raises(AccessDenied, match="needs a token"):
            await client.version()
    async with connect(gateway, access(made, "admin", "client")) as client:
        assert await client.version()
    assert broker.envelopes == []


async def test_health_checks_work_with_tls_and_a_token(gateways: Gateways, made: Path) -> None:
    gateway = await gateways.open(**tls(made, tokens=made / "tokens.toml"))
    await until_ready(gateway, access(made, "b"))


async def test_the_status_command_proves_itself(gateways: Gateways, made: Path) -> None:
    gateway = await gateways.open(**tls(made, tokens=made / "tokens.toml"))
    bound = gateway.listeners[0].bound
    how = {"tls_ca": made / "ca.pem", "token_file": made / "a.token"}
    await until_ready(gateway, access(made, "a"))
    [answer] = (await collect(StatusSettings(grpc=(bound,), **how)))["gateways"]
    assert answer.keys() == {"address", "version"}
    [answer] = (await collect(StatusSettings(grpc=(bound,), tls_ca=made / "ca.pem")))["gateways"]
    assert "needs a token" in answer["error"]


async def until_ready(gateway: Gateway, how: Access) -> None:
    async with how.aio_channel(gateway.listeners[0].bound, ()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=60, metadata=how.metadata()):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
    raise AssertionError("the watch ended")


async def test_a_revoked_and_an_added_token_count_without_a_restart(
    gateways: Gateways, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "LOOK_AGAIN_S", 0.0)
    one, two = ("one", "a", '"infer"', ""), ("two", "a", '"infer"', "")
    file = write_tokens(tmp_path / "tokens.toml", one)
    gateway = await gateways.open(tokens=file)
    channel = gateways.client(gateway).channel

    async def codes() -> list[Any]:
        path = f"/{DESCRIPTOR.full_name}/GetVersionFull"
        pairs = [[("authorization", f"Bearer {name}.secret")] for name in ("one", "two")]
        return [(await code_of(channel, path, b"", pair))[0] for pair in pairs]

    assert await codes() == [grpc.StatusCode.OK, UNAUTHENTICATED]
    write_tokens(file, two)
    assert await codes() == [UNAUTHENTICATED, grpc.StatusCode.OK]
    file.write_text("[[token]]\nname = 1\n")  # a mistake locks nobody out, and lets nobody in
    assert await codes() == [UNAUTHENTICATED, grpc.StatusCode.OK]
    file.unlink()
    assert await codes() == [UNAUTHENTICATED, grpc.StatusCode.OK]


async def test_a_renewed_certificate_serves_the_next_connection(
    gateways: Gateways, made: Path, tmp_path: Path
) -> None:
    mine = Path(shutil.copytree(made, tmp_path / "mine"))
    gateway = await gateways.open(**tls(mine))
    async with connect(gateway, access(made)) as client:
        assert await client.version()
    renewed = Authority.new("the next", 1)
    pair = renewed.issue("gateway", ["127.0.0.1"])
    (mine / "gateway.pem").write_bytes(b"half")  # between the two files of a renewal nothing changes
    async with connect(gateway, access(made)) as client:
        assert await client.version()
    (mine / "gateway.key").write_bytes(pair.key)
    (mine / "gateway.pem").write_bytes(pair.certificate)
    async with connect(gateway, access(made)) as client:
        with pytest.raises(FleetUnavailable):
            await client.version()
    async with connect(gateway, Access(ca=renewed.pair.certificate)) as client:
        assert await client.version()


async def test_a_unix_listener_needs_no_token_beside_a_secured_one(
    gateways: Gateways, made: Path, tmp_path: Path
) -> None:
    addresses = ("127.0.0.1:0", f"unix:{tmp_path}/s.sock")
    gateway = await gateways.open(grpc=addresses, **tls(made, tokens=made / "tokens.toml"))
    reply, _ = await gateways.client(gateway, 1).call("GetRankId", pb.Empty())
    assert reply.rank_id == 0


async def test_refusals_are_logged_without_secrets_and_not_one_by_one(
    gateways: Gateways, made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_log, "REPORT_S", 1e9)
    gateway = await gateways.open(tokens=made / "tokens.toml")
    channel = gateways.client(gateway).channel
    for number in range(5):
        await code_of(channel, HEALTH, b"", [("authorization", f"Bearer admin.secret{number}")])
    lines = [r.getMessage() for r in caplog.records if r.name == guard.__name__]
    assert len(lines) == 1
    assert "refused a call from ipv4:127.0.0.1" in lines[0]
    assert "secret" not in caplog.text


def write_tokens(path: Path, *rows: tuple[str, str, str, str]) -> Path:
    """Rows of name, tenant, scopes and more; every token is NAME.secret. The file is replaced whole."""
    text = "".join(
        f'[[token]]\nname = "{name}"\nsha256 = "{tokens.hash_of(f"{name}.secret")}"\n'
        f'tenant = "{tenant}"\nscopes = [{scopes}]\n{more}\n'
        for name, tenant, scopes, more in rows
    )
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)  # noqa: PTH105
    return path


@pytest.mark.parametrize("is_secured", [False, True])
async def test_a_connection_that_says_nothing_is_closed(
    gateways: Gateways, made: Path, monkeypatch: pytest.MonkeyPatch, is_secured: bool
) -> None:
    """Before it has shown a token, or anything: it would hold a file descriptor for as long as it likes."""
    monkeypatch.setattr(listeners, "HANDSHAKE_MS", 300)
    gateway = await gateways.open(**(tls(made) if is_secured else {}))
    host, _, port = gateway.listeners[0].bound.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as raw:
        raw.settimeout(60)
        await asyncio.to_thread(_drain, raw)  # returns when the gateway has closed it


async def test_metadata_that_is_no_text_is_not_logged(
    gateways: Gateways, made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of gRPC refuse to send it, so it is written as HTTP/2 here (RFC 9113, RFC 7541)."""
    monkeypatch.setattr(sparse_log, "REPORT_S", 1e9)
    gateway = await gateways.open(tokens=made / "tokens.toml")
    token = (made / "a.token").read_bytes().strip()
    pairs = {
        b":method": b"POST",
        b":scheme": b"http",
        b":authority": b"gateway",
        b":path": f"/{DESCRIPTOR.full_name}/GetRankId".encode(),
        b"content-type": b"application/grpc",
        b"te": b"trailers",
        b"authorization": b"Bearer " + token + b"\xff",
    }
    block = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in pairs.items())
    host, _, port = gateway.listeners[0].bound.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as raw:
        raw.settimeout(60)
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        raw.sendall(_frame(1, 4, 1, block) + _frame(0, 1, 1, bytes(5)))
        received = b""
        while b"not valid here" not in received:  # of the status details
            data = await asyncio.to_thread(raw.recv, 4096)
            assert data, received
            received += data
    assert token.decode() not in caplog.text
    assert "metadata that is no UTF-8" in caplog.text


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
