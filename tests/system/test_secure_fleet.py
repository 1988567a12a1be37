"""`allspark up --secure`: a whole fleet with TLS, tokens, CURVE and an ACL, from one directory."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from allspark.certs import write_set
from allspark.cli.settings import StatusSettings
from allspark.cli.status import collect
from allspark.client import Access, AccessDenied, AsyncClient, Client, GenerateOptions, StatusError
from allspark.launcher import Fleet, FleetOptions, LaunchError
from allspark_bus.broker_client import BrokerClient
from allspark_bus.errors import BrokerUnavailable, StoreUnavailable
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet_pb
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

from .conftest import SCRIPTED

written: list[str] = []


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secure") / "set"
    write_set(directory, tenants=("a", "b"))
    return directory


@pytest.fixture(scope="module")
def fleet(secure: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("models")
    (root / "m.json").write_text('{"max_length": 512, "max_batch": 16}')
    tenants = root / "tenants.toml"
    tenants.write_text("[tenant.b]\nmax_tokens = 200\n")
    options = FleetOptions(
        secure=secure, model_roots=(root,), worker_command=(sys.executable, SCRIPTED),
        broker_args=("--drain-s=5", f"--tenants={tenants}"), worker_args=("--log-level=debug",),
        gateway_args=("--log-level=debug",), start_timeout_s=300.0,
    )  # fmt: skip
    with Fleet(options, lambda name, line: written.append(line)) as f:
        f.load_model("m", root / "m.json")
        yield f


def access(secure: Path, name: str) -> Access:
    return Access.from_files(ca=secure / "ca.pem", token=secure / f"{name}.token")


def test_two_tenants_share_the_models_and_nothing_else(fleet: Fleet, secure: Path) -> None:
    options = GenerateOptions(max_new_tokens=4)
    with (
        Client(fleet.addresses, access=access(secure, "a")) as a,
        Client(fleet.addresses, access=access(secure, "b")) as b,
    ):
        mine, theirs = a.submit("m", [1, 2, 3], options, "000"), b.submit("m", [7, 8], options, "000")
        tokens = mine.result()
        assert len(tokens) == len(theirs.result()) == 4
        with pytest.raises(StatusError, match="unknown"):
            b.attach("m", "only-a").stop()
        a.submit("m", [1, 2, 3], options, "only-a").result()
        for call in (b.attach("m", "only-a").stop, b.attach("m", "only-a").result):
            with pytest.raises(StatusError) as caught:
                call()
            assert caught.value.status == pb.ALLSPARK_ILLEGAL_REQUEST_ID
        assert a.attach("m", "only-a").result() == tokens
        for client in (a, b):
            with pytest.raises(AccessDenied, match="lacks the scope admin"):
                client.stop_model("m")
        theirs.release()
        assert a.attach("m", "000").result() == tokens


def test_the_tenant_of_a_token_has_its_limits(fleet: Fleet, secure: Path) -> None:
    options = GenerateOptions(max_new_tokens=300)
    with (
        Client(fleet.addresses, access=access(secure, "a")) as a,
        Client(fleet.addresses, access=access(secure, "b")) as b,
    ):
        with pytest.raises(StatusError, match="tenant 'b' may not have more than max_tokens 200") as caught:
            b.submit("m", [1, 2, 3], options).result()
        assert caught.value.status == pb.ALLSPARK_REQUEST_DENIED
        assert len(a.submit("m", [1, 2, 3], options).result()) == 300


async def test_a_stranger_gets_nothing_from_any_port(fleet: Fleet, secure: Path) -> None:
    with pytest.raises(AccessDenied):
        async with AsyncClient(fleet.addresses, access=Access(ca=(secure / "ca.pem").read_bytes())) as client:
            await client.version()
    with pytest.raises(grpc.RpcError) as caught, grpc.insecure_channel(fleet.addresses[0]) as channel:
        await asyncio.to_thread(AllSparkStub(channel).GetVersionFull, pb.Empty(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for endpoint in (*fleet.frontends, *fleet.backends):
        client = BrokerClient([endpoint])
        with pytest.raises(BrokerUnavailable):
            await client.call(fleet_pb.Envelope(get_fleet_status=fleet_pb.GetFleetStatus()), 1.2)
        await client.close()
    store = Store(re.sub(r"allspark@|\?.*", "", fleet.redis_url), patience_s=3.0)
    with pytest.raises(StoreUnavailable, match="Authentication required"):
        await store.command("SMEMBERS", "as:models")
    await store.close()


async def test_the_operator_sees_everything(fleet: Fleet, secure: Path) -> None:
    report = await collect(
        StatusSettings(
            grpc=tuple(fleet.addresses),
            broker=tuple(fleet.frontends),
            curve=secure / "curve" / "gateway",
            tls_ca=secure / "ca.pem",
            token_file=secure / "admin.token",
            timeout_s=60,
        )
    )
    assert all("error" not in part for part in (*report["gateways"], *report["brokers"]))
    assert [model["name"] for model in report["brokers"][0]["models"]] == ["m"]
    assert {"b": "200"}.items() <= {
        t["name"]: t["max_tokens"] for t in report["brokers"][0]["tenants"]
    }.items()
    assert [stat["model_name"] for stat in report["stats"]] == ["m"]


def test_no_secret_is_in_a_command_line_an_environment_or_a_log(fleet: Fleet, secure: Path) -> None:
    secrets = [path.read_text().strip() for path in [*secure.glob("*.token"), *secure.glob("*.password")]]
    for path in secure.rglob("*.key_secret"):
        secrets += re.findall(r'secret-key = "(.*)"', path.read_text())
    assert len(secrets) == 3 + 3 + 5
    texts = ["\n".join(written)]
    for process in fleet.processes.values():
        texts += [Path(f"/proc/{process.pid}/{name}").read_text("utf-8") for name in ("cmdline", "environ")]
    assert len(texts) == 1 + 2 * 4
    assert not [secret for secret in secrets for text in texts if secret in text]


def test_a_directory_that_is_no_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"lacks ca\.pem, gateway\.pem"):
        Fleet(FleetOptions(secure=tmp_path))
    with pytest.raises(ValueError, match="embedded store"):
        FleetOptions(secure=tmp_path, redis="redis://127.0.0.1:1/0")
