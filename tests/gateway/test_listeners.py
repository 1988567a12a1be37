"""Listeners: addresses, tenants, and unix sockets that were left behind."""

import asyncio
import re
import socket
import stat
from pathlib import Path

import pytest
from allspark_gateway.listeners import Listener, ListenError, tenant_of
from allspark_gateway.settings import GatewaySettings
from allspark_proto import allspark_service_pb2 as pb

from .conftest import Client, Gateways, Producer, ScriptedBroker


def listener(address: str) -> Listener:
    return Listener(address, GatewaySettings(grpc=(address,)))


def test_tenants_are_stable_and_legal() -> None:
    assert tenant_of("127.0.0.1:50051") == tenant_of("[::1]:0") == "default"
    a, b = tenant_of("unix:/tmp/a.sock"), tenant_of("unix:/tmp/b.sock")
    assert a != b
    assert a == tenant_of("unix:/tmp/./x/../a.sock") == "unix-cca8a69292a40751"
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", a)


async def test_every_unix_listener_is_its_own_tenant(
    gateways: Gateways, producer: Producer, broker: ScriptedBroker, tmp_path: Path
) -> None:
    paths = [f"unix:{tmp_path}/{name}.sock" for name in "ab"]
    gateway = await gateways.open(grpc=("127.0.0.1:0", *paths))
    clients = [gateways.client(gateway, i) for i in range(3)]
    tenants = ["default", *map(tenant_of, paths)]
    for number, tenant in enumerate(tenants):
        await producer.admit("000", tenant)  # the uuid that every native client counts from
        await producer.add("000", 0, number, tenant=tenant)
    for number, client in enumerate(clients):
        assert await client.get("000") == [number]
        await client.call("StopRequest", pb.StopRequestRequest(uuid="000"))
    assert [e.tenant for e in broker.envelopes] == tenants
    await producer.release("000", tenants[1])
    assert (await clients[1].call("Get", pb.UUID(uuid="000")))[0].empty == 1
    assert await clients[2].length("000") == 1


async def test_sync_of_everything_waits_for_the_own_tenant_only(
    gateways: Gateways, producer: Producer, tmp_path: Path
) -> None:
    gateway = await gateways.open(grpc=("127.0.0.1:0", f"unix:{tmp_path}/a.sock"))
    await producer.admit("u")
    reply, _ = await gateways.client(gateway, 1).call("SyncRequest", pb.StopRequestRequest())
    assert reply.as_status == 0


async def test_a_unix_socket_is_private_and_removed_in_the_end(gateways: Gateways, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    gateway = await gateways.open(grpc=(f"unix:{path}",))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (await gateways.client(gateway).call("GetRankId", pb.Empty()))[0].rank_id == 0
    await gateway.close()
    assert not path.exists()


async def test_a_socket_left_behind_is_replaced(gateways: Gateways, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    gateway = await gateways.open(grpc=(f"unix:{path}",))
    assert (await gateways.client(gateway).call("GetRankId", pb.Empty()))[0].rank_id == 0


async def test_a_socket_that_is_served_stays(gateways: Gateways, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/a.sock"
    gateway = await gateways.open(grpc=(address,))
    with pytest.raises(ListenError, match="another process serves it"):
        await listener(address).open()
    assert (await gateways.client(gateway).call("GetRankId", pb.Empty()))[0].rank_id == 0


async def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ListenError, match="no socket"):
        await listener(f"unix:{path}").open()
    assert path.read_text() == "mine"


async def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(ListenError, match="107 bytes"):
        await listener(f"unix:/tmp/{'x' * 120}").open()


async def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ListenError, match="cannot listen"):
        await listener(f"unix:{tmp_path}/missing/a.sock").open()


async def test_a_port_in_use_is_refused_and_never_shared(gateways: Gateways) -> None:
    gateway = await gateways.open()
    with pytest.raises(ListenError, match="in use"):
        await listener(gateway.listeners[0].bound).open()


async def test_port_zero_becomes_a_real_one(gateways: Gateways, client: Client) -> None:
    gateway = await gateways.open(grpc=("127.0.0.1:0", "localhost:0"))
    ports = [int(one.bound.rpartition(":")[2]) for one in gateway.listeners]
    assert all(ports) and len(set(ports)) == 2
    answers = [gateways.client(gateway, i).call("GetRankId", pb.Empty()) for i in range(2)]
    assert [reply.rank_id for reply, _ in await asyncio.gather(*answers)] == [0, 0]
