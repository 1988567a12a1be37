"""The store on a Redis Cluster: every master is used, slots move, masters die and are replaced."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from allspark_bus import keys
from allspark_bus.catalogue import Catalogue, ModelRecord, ModelState
from allspark_bus.errors import StoreUnavailable
from allspark_bus.ledger import APPENDED, Append, Ending, Ledger
from allspark_bus.store import Store
from allspark_bus.streams import Streams
from allspark_bus.wakeups import Wakeups
from redis.crc import key_slot

from tests.bus.traffic import Writer, entry, follow, tokens_of
from tests.conftest import ValkeyProcess
from tests.topologies import LIMIT_S, ClusterNodes, ask, until


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNodes]:
    """Three masters; the first has a replica."""
    with ClusterNodes(tmp_path_factory.mktemp("cluster"), 3, replicas=1) as found:
        yield found


@pytest.fixture
async def store(nodes: ClusterNodes) -> AsyncIterator[Store]:  # type: ignore[override]
    nodes.wait_until_ok()
    s = Store(nodes.url, patience_s=LIMIT_S)
    yield s
    async for key in s.scan("as:*"):
        await s.command("DEL", key)
    await asyncio.wait_for(s.close(), 60)


def slot(rid: str) -> int:
    return key_slot(keys.stream(rid).encode())


def spread(nodes: ClusterNodes, each: int) -> dict[ValkeyProcess, list[str]]:
    """Ids of requests by the master that has them."""
    found: dict[ValkeyProcess, list[str]] = {}
    i = 0
    while len(found) < 3 or min(map(len, found.values())) < each:
        rid = f"default/k{i}"
        i += 1
        of_node = found.setdefault(nodes.owner(slot(rid)), [])
        if len(of_node) < each:
            of_node.append(rid)
    return found


async def test_requests_on_every_master_are_written_read_listed_and_forgotten(
    nodes: ClusterNodes, store: Store
) -> None:
    ledger, streams, wakeups = Ledger(store), Streams(store), Wakeups(store)
    rids = [rid for of_node in spread(nodes, 8).values() for rid in of_node]
    followers = [asyncio.create_task(follow(streams, wakeups, rid)) for rid in rids]
    admissions = await asyncio.gather(*[ledger.admit(entry(rid), b"d") for rid in rids])
    assert {a.outcome for a in admissions} == {"new"}
    assert (await ledger.admit(entry(rids[0]), b"d")).outcome == "same"
    assert sorted(await ledger.open_requests("m")) == sorted(rids)
    for n in range(3):
        end = Ending(3, "eos") if n == 2 else None
        step = [Append(rid, "m", 1, n, tokens_of(rid, 3)[n : n + 1], end) for rid in rids]
        assert await ledger.append(step) == [(APPENDED, n + 1)] * len(rids)
    got = await asyncio.wait_for(asyncio.gather(*followers), LIMIT_S)
    assert got == [tokens_of(rid, 3) for rid in rids]
    assert await ledger.num_open("m") == 0 and await ledger.num_unreleased("m", "default") == len(rids)
    batch = await streams.take(rids[0], "call", "")
    assert list(batch.tokens) == tokens_of(rids[0], 3)
    await asyncio.gather(*[ledger.release(rid) for rid in rids])
    await store.command("SADD", keys.tenant_requests("gone"), "gone/x")
    assert await ledger.sweep_tenants() == 1, "indexes on all masters are found"
    catalogue = Catalogue(store)
    records = [await catalogue.put(ModelRecord(f"m{i}", b"", ModelState.BUILT)) for i in range(6)]
    assert sorted(await catalogue.all()) == [f"m{i}" for i in range(6)]
    assert all([await catalogue.remove(r) for r in records if r is not None])
    left = [await store.command("PTTL", key) async for key in store.scan("as:*")]
    assert left and min(left) > 0, "only tombstones"
    await wakeups.close()


async def test_a_slot_moves_while_its_requests_are_appended_to(nodes: ClusterNodes, store: Store) -> None:
    ledger, streams, wakeups = Ledger(store), Streams(store), Wakeups(store)
    writer = Writer(ledger, spread(nodes, 1)[nodes.servers[1]][0])
    moving = slot(writer.rid)
    newcomer = next(rid for i in range(10**6) if slot(rid := f"default/n{i}") == moving)
    source, target = nodes.servers[1], nodes.servers[2]
    await writer.start()
    follower = asyncio.create_task(follow(streams, wakeups, writer.rid))
    await writer.grown()

    await asyncio.to_thread(ask, target.port, "CLUSTER", "SETSLOT", moving, "IMPORTING", nodes.id_of(source))
    await asyncio.to_thread(ask, source.port, "CLUSTER", "SETSLOT", moving, "MIGRATING", nodes.id_of(target))
    await writer.grown()  # the keys that are there are still served there
    admission = asyncio.create_task(ledger.admit(entry(newcomer), b"d"))  # neither serves two absent keys
    await _migrate(source, target, keys.request(writer.rid))  # and none serves a script on both keys
    await _migrate(source, target, keys.stream(writer.rid))
    await writer.grown()  # ASK
    for server in (target, source, nodes.servers[0]):
        await asyncio.to_thread(ask, server.port, "CLUSTER", "SETSLOT", moving, "NODE", nodes.id_of(target))
    await writer.grown()  # MOVED
    assert (await asyncio.wait_for(admission, LIMIT_S)).outcome == "new"
    generated = await writer.end()
    assert await asyncio.wait_for(follower, LIMIT_S) == generated
    assert await ledger.tokens(writer.rid) == generated and writer.rewinds == 0
    home = store.home(keys.stream(writer.rid))
    assert home is not None and home.address == f"127.0.0.1:{target.port}"
    await wakeups.close()


async def _migrate(source: ValkeyProcess, target: ValkeyProcess, key: str) -> None:
    await asyncio.to_thread(ask, source.port, "MIGRATE", "127.0.0.1", target.port, key, 0, 60_000)


async def test_calls_wait_for_a_master_that_is_killed_and_comes_back(
    nodes: ClusterNodes, store: Store
) -> None:
    ledger, streams, wakeups = Ledger(store), Streams(store), Wakeups(store)
    writers = [Writer(ledger, rid) for of_node in spread(nodes, 3).values() for rid in of_node]
    for writer in writers:
        await writer.start()
    followers = [asyncio.create_task(follow(streams, wakeups, w.rid)) for w in writers]
    await asyncio.gather(*[w.grown() for w in writers])
    nodes.servers[1].kill()
    impatient = Store(nodes.url, patience_s=0.2)
    with pytest.raises(StoreUnavailable):
        await impatient.ping()
    await impatient.close()
    nodes.servers[1].start()
    await asyncio.gather(*[w.grown() for w in writers])
    await asyncio.wait_for(store.ping(), LIMIT_S)
    generated = [await w.end() for w in writers]
    assert await asyncio.wait_for(asyncio.gather(*followers), LIMIT_S) == generated
    assert [await ledger.tokens(w.rid) for w in writers] == generated
    assert sum(w.rewinds for w in writers) == 0
    await wakeups.close()


async def test_a_replica_takes_over_from_a_killed_master(nodes: ClusterNodes, store: Store) -> None:
    """The replica may miss what was acknowledged last: the writers go on from what it has."""
    ledger, streams, wakeups = Ledger(store), Streams(store), Wakeups(store)
    killed = nodes.servers[0]
    rids = spread(nodes, 4)[killed]
    writers = [Writer(ledger, rid) for rid in rids]
    for writer in writers:
        await writer.start()
    followers = [asyncio.create_task(follow(streams, wakeups, rid)) for rid in rids]
    await asyncio.gather(*[w.grown() for w in writers])
    killed.kill()
    await asyncio.gather(*[w.grown() for w in writers])
    generated = [await w.end() for w in writers]
    assert await asyncio.wait_for(asyncio.gather(*followers), LIMIT_S) == generated
    assert [await ledger.tokens(w.rid) for w in writers] == generated
    assert nodes.owner(slot(rids[0])) is nodes.servers[3]
    await wakeups.close()
    killed.start()
    await until("the old master follows", lambda: ask(killed.port, "ROLE")[0] == "slave")


async def test_an_open_request_that_another_master_forgot_is_indexed_again(store: Store) -> None:
    ledger = Ledger(store)
    for name in ("open", "ended"):
        await ledger.admit(entry(f"default/{name}"), b"d")
    await ledger.append([Append("default/ended", "m", 1, 0, (), Ending(3, "eos"))])
    before = await ledger.open_entries("m")
    assert [rid for rid, _ in before] == ["default/open"]
    await store.command("DEL", keys.open_requests("m"))
    assert await ledger.sweep_tenants() == 0
    assert await ledger.open_entries("m") == before


async def test_without_any_node_calls_fail_within_their_patience() -> None:
    store = Store("redis+cluster://127.0.0.1:1,127.0.0.1:2", patience_s=0.2)
    with pytest.raises(StoreUnavailable, match="unreachable"):
        await store.command("EXISTS", keys.MODELS)
    with pytest.raises(StoreUnavailable):
        await store.ping()
    waiting = asyncio.ensure_future(store.command("EXISTS", keys.MODELS))
    await asyncio.sleep(0)  # it is sent
    await store.close()
    with pytest.raises(StoreUnavailable):
        await waiting
