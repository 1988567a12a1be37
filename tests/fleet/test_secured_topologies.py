"""A fleet whose Sentinel or cluster is reached by TLS as an ACL user only, through a fail-over."""

import asyncio
from pathlib import Path

import pytest
from allspark.certs import write_set
from allspark_bus import keys

from tests.conftest import ValkeyProcess
from tests.fleet.harness import MiniFleet
from tests.fleet.scripted_engine import expected_tokens
from tests.tls_doors import DOOR, TlsDoors
from tests.topologies import ClusterNodes, Replicated, ask, until

SENTINEL_PASSWORD = "of-the-sentinel"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "set"
    write_set(directory, hosts=(DOOR,))
    (directory / "sentinel.password").write_text(SENTINEL_PASSWORD)
    return directory


def admit(made: Path, port: int) -> None:
    """The user of the fleet, as the ACL file of the set has it; the default user stays, for the test."""
    [line] = [
        row for row in (made / "store.acl").read_text().splitlines() if row.startswith("user allspark ")
    ]
    assert ask(port, "ACL", "SETUSER", *line.split()[1:]) == "OK"


def options(made: Path) -> str:
    return f"ssl_ca_certs={made}/ca.pem&password_file={made}/store.password"


async def run(f: MiniFleet, uuid: str, new: int) -> None:
    while (reply := await f.submit(uuid, [8, 9], new)).unavailable:
        pass  # the broker has not found the next master yet
    assert reply.as_status == 0, reply.reason


async def check(f: MiniFleet, uuid: str, new: int) -> None:
    batch = await asyncio.wait_for(f.result(uuid), 60)
    assert list(batch.tokens) == expected_tokens([8, 9], new)


def connected(server: ValkeyProcess, doors: TlsDoors) -> int:
    """How many connections of the fleet a server has; each came through its door, and broke no rule."""
    assert ask(server.port, "ACL", "LOG") == []
    rows = [
        dict(w.split("=", 1) for w in row.split()) for row in ask(server.port, "CLIENT", "LIST").splitlines()
    ]
    own = [int(row["addr"].rpartition(":")[2]) for row in rows if row["user"] == "allspark"]
    assert set(own) <= doors.inside
    return len(own)


async def test_a_secured_sentinel_names_the_next_master(
    replicated: Replicated, made: Path, tmp_path: Path
) -> None:
    ports = [replicated.sentinel_port, *[server.port for server in replicated.servers]]
    for server in replicated.servers:
        admit(made, server.port)
    rule = f"reset on >{SENTINEL_PASSWORD} +sentinel|masters +client|setinfo"  # docs/security.md
    assert ask(replicated.sentinel_port, "ACL", "SETUSER", "watcher", *rule.split()) == "OK"
    login = f"sentinel_user=watcher&sentinel_password_file={made}/sentinel.password"
    with TlsDoors(made, ports) as doors:
        url = f"rediss+sentinel://allspark@{DOOR}:{replicated.sentinel_port}/m?{options(made)}&{login}"
        f = MiniFleet(url, tmp_path)
        try:
            f.write_model(step_s=0.01, max_batch=16)
            f.start_worker()
            await f.build_and_start()
            await run(f, "before", 5)
            await check(f, "before", 5)
            await run(f, "during", 200)
            await f.generated("during", 5)
            master = replicated.master_port()
            other = next(s for s in replicated.servers if s.port != master)
            record = keys.request("default/during")
            await until("the replica has the request", lambda: ask(other.port, "EXISTS", record))
            await asyncio.to_thread(replicated.kill_master)
            await until("the replica is promoted", lambda: replicated.master_port() == other.port)
            await check(f, "during", 200)
            await run(f, "after", 5)
            await check(f, "after", 5)
            assert await asyncio.to_thread(connected, other, doors) >= 2, "of the broker and the worker"
            assert await asyncio.to_thread(ask, replicated.sentinel_port, "ACL", "LOG") == []
        finally:
            await f.close()


async def test_a_secured_cluster_is_served_from_all_its_nodes(
    nodes: ClusterNodes, made: Path, tmp_path: Path
) -> None:
    for server in nodes.servers:
        admit(made, server.port)
    with TlsDoors(made, [server.port for server in nodes.servers]) as doors:
        f = MiniFleet(f"rediss+cluster://allspark@{DOOR}:{nodes.servers[0].port}?{options(made)}", tmp_path)
        try:
            f.write_model(max_batch=16)
            f.start_worker()
            await f.build_and_start()
            uuids = [f"u{i}" for i in range(24)]  # all in one third of the slots: one in 10^10
            for uuid in uuids:
                await run(f, uuid, 10)
            for uuid in uuids:
                await check(f, uuid, 10)
            for server in nodes.servers:
                assert await asyncio.to_thread(connected, server, doors) >= 1
        finally:
            await f.close()
