"""Which brokers live, as Redis knows it."""

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


async def test_silent_broker_is_gone(store: Store) -> None:
    lively, silent = Presence(store, "lively", 3600), Presence(store, "silent", 3600)
    await silent.renew()
    await lively.renew()
    await store.command("ZADD", keys.BROKERS, 1, "silent")  # 1970
    assert (await lively.renew()).brokers == {"lively"}
    assert await store.command("ZRANGE", keys.BROKERS, 0, -1) == [b"lively"], "nothing stays of it"
    assert (await silent.renew()).brokers == {"lively", "silent"}, "it may come back"


async def test_broker_that_was_silent_itself_learns_that_and_removes_nobody(store: Store) -> None:
    one, other = Presence(store, "one", 3600), Presence(store, "other", 3600)
    await one.renew()
    await other.renew()
    await store.command("ZADD", keys.BROKERS, 1, "one", 1, "other")  # as after an outage
    back = await one.renew()
    assert (back.brokers, back.was_known) == ({"one"}, False)
    assert set(await store.command("ZRANGE", keys.BROKERS, 0, -1)) == {b"one", b"other"}
