"""CURVE at real brokers and workers: who connects, what a key allows, and what happens when it is removed."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import zmq
import zmq.asyncio
from allspark.certs import write_set
from allspark.cli.settings import StatusSettings
from allspark.cli.status import collect
from allspark_broker.access import DOORS, FRONTEND
from allspark_broker.settings import BrokerSettings
from allspark_bus import curve, sockets, sparse_log
from allspark_bus.broker_client import BrokerClient
from allspark_bus.curve import AllowList, ClientKeys, CurveError, Doorkeeper, Peer, Role, ServerKeys
from allspark_bus.errors import BrokerUnavailable
from allspark_bus.store import Store
from allspark_bus.streams import Streams
from allspark_bus.wakeups import Wakeups
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from .harness import BROKER, SCRIPTED, Process, request, until_ended

SILENCE_S = 1.2  # longer than a broker takes to answer anything here


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "set"
    write_set(directory, tenants=("a", "b"))
    return directory / "curve"


class CurveFleet:
    """A broker and a worker that know each other's keys; `keys` is a copy that a test may change."""

    def __init__(self, redis: str, keys: Path, models: Path) -> None:
        self.keys = keys
        self.broker = Process(
            sys.executable, "-c", BROKER, f"--redis={redis}", "--frontend=tcp://127.0.0.1:0",
            "--backend=tcp://127.0.0.1:0", "--heartbeat-s=0.1", "--worker-timeout-s=5", "--drain-s=5",
            "--ack-timeout-s=10", f"--curve={keys}/broker",
        )  # fmt: skip
        self.frontend, self.backend = self.broker.addresses["frontend"], self.broker.addresses["backend"]
        self.worker = Process(
            sys.executable, SCRIPTED, f"--redis={redis}", f"--broker={self.backend}",
            f"--model-root={models}", "--heartbeat-s=0.1", "--broker-timeout-s=3.0", f"--curve={keys}/worker",
        )  # fmt: skip
        self.store = Store(redis)
        self.streams = Streams(self.store)
        self.wakeups = Wakeups(self.store)
        self.clients = {
            name: BrokerClient([self.frontend], keys=ClientKeys.read(keys / name))
            for name in ("gateway", "producer-a", "producer-b")
        }

    async def call(self, who: str, timeout_s: float = 60.0, tenant: str = "", **call: Any) -> fleet.Reply:
        return await self.clients[who].call(fleet.Envelope(tenant=tenant, **call), timeout_s)

    async def load(self, models: Path) -> None:
        (models / "m.json").write_text("{}")
        config = pb.ModelStructConfig(model_name="m", model_path="m.json")
        assert (await self.call("gateway", build_model=config)).as_status == 0
        assert (await self.call("gateway", start_model=pb.ModelName(model_name="m"))).as_status == 0

    async def tokens(self, tenant: str, uuid: str) -> list[int]:
        await until_ended(self.wakeups, self.streams, f"{tenant}/{uuid}")
        return list((await self.streams.read(f"{tenant}/{uuid}", 0)).tokens)

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        await self.wakeups.close()
        await self.store.close()
        self.worker.kill()
        self.broker.kill()


@pytest.fixture
async def curve_fleet(valkey: Any, made: Path, tmp_path: Path) -> AsyncIterator[CurveFleet]:
    keys = Path(shutil.copytree(made, tmp_path / "keys"))
    f = CurveFleet(valkey.url, keys, tmp_path)
    yield f
    await f.close()


async def test_keys_decide_who_may_do_what(curve_fleet: CurveFleet, made: Path, tmp_path: Path) -> None:
    await curve_fleet.load(tmp_path)  # so the worker was admitted too

    # A producer's requests are its tenant's, named or not, and never another's.
    for uuid, tenant in (("u", ""), ("v", "a")):
        reply = await curve_fleet.call("producer-a", tenant=tenant, start_request=request(uuid, [1, 2], 3))
        assert reply.as_status == 0, reply.reason
        assert len(await curve_fleet.tokens("a", uuid)) == 3
    reply = await curve_fleet.call("producer-a", tenant="b", start_request=request("w", [1], 1))
    assert "not one of tenant b" in reply.reason
    reply = await curve_fleet.call("producer-b", release_request=pb.StopRequestRequest(uuid="u"))
    assert reply.as_status == pb.ALLSPARK_ILLEGAL_REQUEST_ID
    # It changes no models and stops nothing; a gateway speaks for everybody.
    for call in ("build_model", "start_model", "stop_model", "release_model", "unload_model", "reload_model"):
        kind = pb.ModelStructConfig if call == "build_model" else pb.ModelName
        reply = await curve_fleet.call("producer-a", **{call: kind(model_name="m")})
        assert (reply.as_status, call in reply.reason) == (pb.ALLSPARK_INVALID_CALL_ERROR, True)
    asked = fleet.GetFleetStatus(with_tenants=True)
    status = (await curve_fleet.call("producer-a", get_fleet_status=asked)).fleet_status
    assert [row.name for row in status.tenants] == ["a"], "of other tenants it is told nothing"
    reply = await curve_fleet.call("producer-a", shutdown_service=pb.Empty())
    assert reply.as_status == pb.ALLSPARK_INVALID_CALL_ERROR
    reply = await curve_fleet.call("gateway", tenant="a", release_request=pb.StopRequestRequest(uuid="u"))
    assert reply.as_status == 0

    await _strangers_get_nothing(curve_fleet, made)
    await _nobody_takes_over_the_answers_of_another(curve_fleet)
    await _the_status_command_needs_a_key(curve_fleet)

    # A removed key counts for connections that are open.
    (curve_fleet.keys / "broker" / "producers" / "a.key").unlink()
    (curve_fleet.keys / "broker" / "workers" / "worker.key").unlink()
    while await _is_answered(curve_fleet.clients["producer-a"]):
        pass
    while (await curve_fleet.call("gateway", get_fleet_status=fleet.GetFleetStatus())).fleet_status.workers:
        await asyncio.sleep(0.05)  # polls the broker, until it takes the worker for dead


async def _strangers_get_nothing(f: CurveFleet, made: Path) -> None:
    """Without CURVE, with a wrong server key, with an unknown key, or with a key of the other door."""
    gateway, worker = ClientKeys.read(made / "gateway"), ClientKeys.read(made / "worker")
    public, secret = zmq.curve_keypair()
    strangers = {
        "plain": None,
        "wrong server key": ClientKeys(public, gateway.public, gateway.secret),
        "unknown key": ClientKeys(gateway.server, public, secret),
    }
    knocks = [(f.frontend, how) for how in (*strangers.values(), worker)]
    knocks += [(f.backend, how) for how in (*strangers.values(), gateway)]
    answers = await asyncio.gather(*[_knock(endpoint, how) for endpoint, how in knocks])
    assert answers == [None] * len(knocks)
    assert await _knock(f.frontend, gateway, patience_s=60) is not None
    assert await _knock(f.backend, worker, patience_s=60) is not None


async def _knock(
    endpoint: str, keys: ClientKeys | None, identity: bytes = b"", patience_s: float = SILENCE_S
) -> bytes | None:
    """What a peer gets for an envelope, or for a worker's heartbeat; garbage is answered as well."""
    context = zmq.asyncio.Context()
    identity = identity or uuid4().hex.encode()
    socket = sockets.dealer(context, endpoint, identity=identity, keys=keys)
    beat = fleet.FromWorker(version=1, worker_id=identity.decode(), heartbeat=fleet.WorkerHeartbeat())
    call = fleet.Envelope(version=1, correlation_id="c", get_fleet_status=fleet.GetFleetStatus())
    try:
        async with asyncio.timeout(patience_s):  # a peer that is not admitted cannot even send
            for message in (beat, call):
                await socket.send_multipart([sockets.HEADER, message.SerializeToString()])
            return bytes((await socket.recv_multipart())[-1])
    except TimeoutError:
        return None
    finally:
        context.destroy(linger=0)


async def _nobody_takes_over_the_answers_of_another(f: CurveFleet) -> None:
    """Two producers whose sockets have the same identity."""
    context = zmq.asyncio.Context()
    holder = sockets.dealer(
        context, f.frontend, identity=b"same", keys=ClientKeys.read(f.keys / "producer-a")
    )
    call = fleet.Envelope(version=1, correlation_id="c", get_fleet_status=fleet.GetFleetStatus())
    frames = [sockets.HEADER, call.SerializeToString()]
    try:
        for _ in range(2):
            await holder.send_multipart(frames)
            await asyncio.wait_for(holder.recv_multipart(), 60)
            assert await _knock(f.frontend, ClientKeys.read(f.keys / "producer-b"), b"same") is None
    finally:
        context.destroy(linger=0)


async def _is_answered(client: BrokerClient) -> bool:
    try:
        await client.call(fleet.Envelope(get_fleet_status=fleet.GetFleetStatus()), SILENCE_S)
    except BrokerUnavailable:
        return False
    return True


async def _the_status_command_needs_a_key(f: CurveFleet) -> None:
    known_as = {"curve": f.keys / "gateway", "timeout_s": 60}
    [known] = (await collect(StatusSettings(broker=(f.frontend,), **known_as)))["brokers"]
    [stranger] = (await collect(StatusSettings(broker=(f.frontend,), timeout_s=SILENCE_S)))["brokers"]
    assert [model["name"] for model in known["models"]] == ["m"]
    assert "no answer from the broker" in stranger["error"]


async def test_a_broker_with_another_key_is_not_served(made: Path) -> None:
    """Whoever takes a broker's address gets no message: not even the announcement of a worker."""
    context = zmq.asyncio.Context()
    public, secret = zmq.curve_keypair()
    endpoints = []
    impostors = []
    for keys in (None, ServerKeys(public, secret)):
        socket, endpoint = sockets.router(context, "tcp://127.0.0.1:0", keys=keys, door="*")
        impostors.append(socket)
        endpoints.append(endpoint)
    client = BrokerClient(endpoints, keys=ClientKeys.read(made / "gateway"))
    try:
        with pytest.raises(BrokerUnavailable):
            await client.call(fleet.Envelope(get_fleet_status=fleet.GetFleetStatus()), SILENCE_S)
        for socket in impostors:
            assert await socket.poll(0) == 0
    finally:
        await client.close()
        context.destroy(linger=0)


def test_keys_are_found_by_role_and_read_again(made: Path, tmp_path: Path) -> None:
    keys = Path(shutil.copytree(made / "broker", tmp_path / "broker"))
    clock = [0.0]
    allowed = AllowList(keys, lambda: clock[0])
    a, worker = ClientKeys.read(made / "producer-a"), ClientKeys.read(made / "worker")
    assert allowed.peer(a.public) == Peer(Role.PRODUCER, "a")
    assert allowed.peer(worker.public) == Peer(Role.WORKER, "worker")
    assert allowed.peer(b"x" * 40) is None
    (keys / "producers" / "a.key").rename(keys / "producers" / "c.key")
    (keys / "workers" / "worker.key").unlink()
    assert allowed.peer(a.public) == Peer(Role.PRODUCER, "a")  # not looked at yet
    clock[0] = 1.0
    assert allowed.peer(a.public) == Peer(Role.PRODUCER, "c")
    assert allowed.peer(worker.public) is None
    (keys / "workers" / "half.key").write_text('curve\n    public-key = "abc\n')  # changes nothing
    clock[0] = 2.0
    assert allowed.peer(a.public) == Peer(Role.PRODUCER, "c")


def test_bad_directories_are_refused_with_the_file(made: Path, tmp_path: Path) -> None:
    with pytest.raises(CurveError, match=r"cannot read the CURVE key .*client\.key_secret"):
        ClientKeys.read(tmp_path)
    shutil.copy(made / "worker" / "server.key", tmp_path / "server.key_secret")
    with pytest.raises(CurveError, match="holds no CURVE secret key"):
        ServerKeys.read(tmp_path)
    (tmp_path / "gateways").mkdir()
    for name in ("x", "y"):
        shutil.copy(made / "broker" / "producers" / "a.key", tmp_path / "gateways" / f"{name}.key")
    with pytest.raises(CurveError, match=r"y\.key is the key of x too"):
        AllowList(tmp_path)


def test_a_secret_that_everybody_can_read_is_warned_about(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Path(shutil.copytree(made / "worker", tmp_path / "keys"))
    ClientKeys.read(keys)
    assert caplog.text == ""
    (keys / "client.key_secret").chmod(0o644)
    ClientKeys.read(keys)
    assert "every user of this machine can read the secret in" in caplog.text


def test_secret_keys_are_in_no_repr(made: Path) -> None:
    for keys in (ClientKeys.read(made / "worker"), ServerKeys.read(made / "broker")):
        assert keys.secret.decode() not in repr(keys)


def test_curve_is_enough_for_a_broker_to_listen_for_others() -> None:
    remote = {"frontend": "tcp://0.0.0.0:1", "backend": "tcp://0.0.0.0:2"}
    with pytest.raises(ValueError, match="--allow-remote"):
        BrokerSettings(**remote)
    assert BrokerSettings(**remote, curve=Path("/keys")).is_secured()


async def test_refused_keys_are_not_logged_one_by_one(
    made: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reaches the port can try a new key a thousand times a second."""
    monkeypatch.setattr(sparse_log, "REPORT_S", 1e9)
    context = zmq.asyncio.Context()
    keeper = Doorkeeper(context, AllowList(made / "broker"), DOORS)
    for _ in range(5):
        assert not keeper.callback(FRONTEND, zmq.curve_keypair()[0])
    context.destroy(linger=0)
    [line] = [r.getMessage() for r in caplog.records if r.name == curve.__name__]
    assert "refused a connection to the frontend: an unknown key" in line
