"""A fleet on a Redis Cluster, and behind a Sentinel when the master dies with what no replica has."""

import asyncio
from pathlib import Path

from allspark_bus import keys
from allspark_proto import records

from tests.fleet.harness import MiniFleet, polled
from tests.fleet.scripted_engine import expected_tokens
from tests.topologies import ClusterNodes, Replicated, ask, until


async def check(f: MiniFleet, uuid: str, prompt: list[int], new: int) -> None:
    """Every token once and one end, in the stream as for its readers."""
    batch = await f.result(uuid)
    assert list(batch.tokens) == expected_tokens(prompt, new), uuid
    entries = await f.store.command("XRANGE", keys.stream(f"default/{uuid}"), "-", "+")
    found = [records.decode(fields[1]) for _, fields in entries]
    assert records.tokens_of(found) == expected_tokens(prompt, new), uuid
    assert [r.is_terminal for r in found] == [False] * (len(found) - 1) + [True], uuid


async def test_tokens_that_were_lost_with_the_master_are_appended_again(
    replicated: Replicated, tmp_path: Path
) -> None:
    """The replica stops following before the master dies, so the streams go back, and an end is lost."""
    f = MiniFleet(replicated.url(), tmp_path)
    try:
        gate = tmp_path / "the-replica-is-detached"
        f.write_model(step_s=0.01, max_batch=16, gate=str(gate), gate_at=20)
        f.start_worker()
        await f.build_and_start()
        running = [f"u{i}" for i in range(4)]
        for i, uuid in enumerate(running):
            await f.submit(uuid, [8, i], 400)
        await f.submit("ends", [9, 9], 60)
        for uuid in (*running, "ends"):
            await f.generated(uuid, 5)
        master = replicated.master_port()
        replica = next(s for s in replicated.servers if s.port != master)
        kept = await asyncio.to_thread(_detach, replica.port, "ends")
        gate.touch()
        await f.result("ends")
        for uuid in running:
            await f.generated(uuid, kept + 20)
        await asyncio.to_thread(replicated.kill_master)
        await until("the replica is promoted", lambda: replicated.master_port() == replica.port)
        for i, uuid in enumerate(running):
            await check(f, uuid, [8, i], 400)
        await check(f, "ends", [9, 9], 60)
        assert f.store.home(keys.MODELS).address == f"127.0.0.1:{replica.port}"  # type: ignore[union-attr]
    finally:
        await f.close()


def _detach(replica_port: int, uuid: str) -> int:
    """The replica follows nobody that answers; returns how many tokens of a request it has."""
    assert ask(replica_port, "REPLICAOF", "127.0.0.1", 1) == "OK"
    state, num_tokens = ask(replica_port, "HMGET", keys.request(f"default/{uuid}"), "st", "n")
    assert state == "open", "the replica has its admission, and not its end"
    return int(num_tokens)


async def test_requests_on_a_cluster_outlive_a_master_that_is_restarted(
    nodes: ClusterNodes, tmp_path: Path
) -> None:
    f = MiniFleet(nodes.url, tmp_path)
    try:
        f.write_model(step_s=0.01, max_batch=16)
        f.start_worker()
        await f.build_and_start()
        uuids = [f"u{i}" for i in range(12)]
        for i, uuid in enumerate(uuids):
            await f.submit(uuid, [8, i], 100)
        for uuid in uuids:
            await f.generated(uuid, 5)
        nodes.servers[1].kill()
        nodes.servers[1].start()
        for i, uuid in enumerate(uuids):
            await check(f, uuid, [8, i], 100)
        await f.store.ping()

        async def all_have_ended() -> bool:
            return await f.ledger.num_open("m") == 0

        await polled(all_have_ended)  # the index follows
    finally:
        await f.close()
