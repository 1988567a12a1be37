"""Which brokers live, as Redis knows it."""

import asyncio

from allspark_bus import keys
from allspark_bus.presence import Presence
from allspark_bus.store import Store


async def test_brokers_know_of_each_other_until_one_leaves(store: Store) -> None:
    a, b = Presence(store, "a", 3600), Presence(store, "b", 3600)
    first = await a.renew()
    assert (first.brokers, first.was_known) == ({"a"}, False)
    assert (await b.renew()).brokers == {"a", "b"}
    again = await a.renew()
    assert (again.brokers, again.was_known) == ({"a", "b"}, True)
    await b.leave()
    assert (await a.renew()).brokers == {"a"}


async def test_silent_broker_is_gone_and_does_not_judge_others_when_it_is_back(store: Store) -> None:
    lively, silent = Presence(store, "lively", 3600), Presence(store, "silent", 0.05)
    await silent.renew()
    await lively.renew()
    await store.command("ZADD", keys.BROKERS, 1, "silent")  # 1970
    assert (await lively.renew()).brokers == {"lively"}
    assert await store.command("ZRANGE", keys.BROKERS, 0, -1) == [b"lively"], "nothing stays of it"
    back = await silent.renew()
    assert not back.was_known and back.brokers >= {"silent"}
    while "lively" in (await silent.renew()).brokers:
        await asyncio.sleep(0.005)  # until Valkey's clock has passed the 50 ms, in which "silent" spoke
    assert (await lively.renew()).brokers == {"lively", "silent"}
