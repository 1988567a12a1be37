"""The store behind Sentinels: the master dies, or is replaced while it lives, under load."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from allspark_bus import keys
from allspark_bus.errors import StoreUnavailable
from allspark_bus.ledger import APPENDED, Append, Ending, Ledger
from allspark_bus.store import Store
from allspark_bus.streams import Streams
from allspark_bus.wakeups import Wakeups

from tests.bus.traffic import Writer, entry, follow
from tests.topologies import LIMIT_S, Replicated, ask, until


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    with Replicated(tmp_path_factory.mktemp("replicated"), replicas=2) as found:
        yield found


@pytest.fixture
async def store(servers: Replicated) -> AsyncIterator[Store]:  # type: ignore[override]
    """Acknowledges nothing that is on the master alone."""
    servers.wait_for_replicas(1)
    s = Store(servers.url(min_replicas=1), patience_s=LIMIT_S)
    yield s
    await asyncio.wait_for(s.close(), 60)


async def taken(streams: Streams, wakeups: Wakeups, rid: str) -> list[int]:
    """What a reader without a position of its own is given."""
    seen: list[int] = []
    async with wakeups.watch(rid) as event:
        while True:
            event.clear()
            batch = await streams.take(rid, f"call{len(seen)}", "")
            seen += batch.tokens
            if batch.has_data:
                await streams.settle(rid, f"call{len(seen) - len(batch.tokens)}", arrived=True)
            elif batch.status:
                return seen
            else:
                await asyncio.wait_for(event.wait(), LIMIT_S)


async def test_nothing_acknowledged_is_lost_with_the_master(servers: Replicated, store: Store) -> None:
    ledger, streams, wakeups = Ledger(store), Streams(store), Wakeups(store)
    writers = [Writer(ledger, f"default/u{i}") for i in range(12)]
    for writer in writers:
        await writer.start()
    followers = [asyncio.create_task(follow(streams, wakeups, w.rid)) for w in writers]
    takers = [asyncio.create_task(taken(streams, wakeups, w.rid)) for w in writers]
    await asyncio.gather(*[w.grown() for w in writers])
    killed = servers.kill_master()
    await asyncio.gather(*[w.grown() for w in writers])
    generated = [await w.end() for w in writers]
    assert await asyncio.wait_for(asyncio.gather(*followers), LIMIT_S) == generated
    assert await asyncio.wait_for(asyncio.gather(*takers), LIMIT_S) == generated
    assert [await ledger.tokens(w.rid) for w in writers] == generated
    assert [w.rewinds for w in writers] == [0] * len(writers)
    await wakeups.close()
    await asyncio.to_thread(servers.bring_back, killed)


async def test_a_master_that_lives_is_left_when_it_is_replaced(servers: Replicated, store: Store) -> None:
    """It goes on for seconds, with a replica, and acknowledges writes that will be thrown away."""
    ledger, wakeups = Ledger(store), Wakeups(store)
    writer = Writer(ledger, "default/v")
    await writer.start()
    await writer.grown()
    parked = Store(servers.url(), patience_s=LIMIT_S)
    parked_wakeups = Wakeups(parked)
    follower = asyncio.create_task(follow(Streams(parked), parked_wakeups, writer.rid))
    before = servers.master_port()
    await asyncio.to_thread(ask, servers.sentinel_port, "SENTINEL", "FAILOVER", "m")
    await until("another server is the master", lambda: servers.master_port() != before)
    address = f"127.0.0.1:{servers.master_port()}"
    for s in (store, parked):
        home = s.home(keys.stream(writer.rid))
        assert home is not None
        await until("the old master is left", lambda home=home: home.address == address)
    await writer.grown()
    generated = await writer.end()
    assert await asyncio.wait_for(follower, LIMIT_S) == generated
    assert await ledger.tokens(writer.rid) == generated
    for part in (wakeups, parked_wakeups, parked):
        await part.close()


async def until_refused(call: Callable[[], Awaitable[object]], reason: str) -> None:
    """For this reason, and not only because the servers were slow."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with pytest.raises(StoreUnavailable) as refused:
                await call()
            if re.search(reason, str(refused.value)):
                return


async def test_without_enough_replicas_nothing_is_acknowledged(servers: Replicated, store: Store) -> None:
    ledger = Ledger(store)
    await ledger.admit(entry("default/w"), b"d")
    demanding = Store(servers.url(min_replicas=3), patience_s=0.5)
    await until_refused(lambda: Ledger(demanding).admit(entry("default/x"), b"d"), "replica")
    with pytest.raises(StoreUnavailable):
        await demanding.ping()
    await demanding.close()
    port = servers.master_port()
    await asyncio.to_thread(ask, port, "CONFIG", "SET", "min-replicas-to-write", "3")
    call = asyncio.create_task(ledger.append([Append("default/w", "m", 1, 0, [7], Ending(3, "eos"))]))
    impatient = Store(servers.url(), patience_s=0.2)
    await until_refused(lambda: Ledger(impatient).admit(entry("default/y"), b"d"), "(?i)replicas")
    await impatient.close()
    await asyncio.to_thread(ask, port, "CONFIG", "SET", "min-replicas-to-write", "0")
    assert await asyncio.wait_for(call, LIMIT_S) == [(APPENDED, 1)], "it was tried again until it could be"


async def test_a_name_that_no_sentinel_knows_is_unavailable(servers: Replicated) -> None:
    store = Store(servers.url().replace("/m?", "/other?"), patience_s=0.2)
    await until_refused(store.ping, "knows a master 'other'")
    await store.close()
