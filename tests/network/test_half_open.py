"""Connections that a cut left open are given up, although nothing ever says that they are dead."""

import asyncio
from collections.abc import Iterator

import pytest
from allspark_bus import keys
from allspark_bus.store import Store
from allspark_bus.wakeups import Wakeups

from tests.conftest import ValkeyProcess
from tests.network.proxy import FAULTS, Link, Network, Proxy

PATIENCE_S = 90.0


@pytest.fixture
def proxy(valkey: ValkeyProcess) -> Iterator[Proxy]:
    with Network() as network:
        yield network.proxy("store", f"127.0.0.1:{valkey.port}")


@pytest.fixture
def no_time_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a probe can help: what else ends the waiting takes longer than the test may."""
    for module in ("round_trip", "node"):
        monkeypatch.setattr(f"allspark_bus.{module}.REPLY_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("allspark_bus.connections.CONNECT_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("allspark_bus.node.CONNECT_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("allspark_bus.probe.FIRST_S", 0.05)


@pytest.mark.parametrize("fault", ["cut", "cut-up", "cut-down"])
@pytest.mark.parametrize("is_connected", [True, False], ids=["open", "opening"])
@pytest.mark.usefixtures("no_time_outs")
async def test_a_call_gets_through_after_a_cut(proxy: Proxy, fault: str, is_connected: bool) -> None:
    store = Store(f"redis://{proxy.address}/0", patience_s=None)
    try:
        if is_connected:
            await store.command("SET", "before", 1)
            assert store.silent_s() == 0
        proxy.set(FAULTS[fault])
        waiting = asyncio.ensure_future(store.command("INCR", "during"))
        async with asyncio.timeout(PATIENCE_S):
            while store.silent_s() < 0.2:
                await asyncio.sleep(0.01)  # polling: silence makes no noise
        assert not waiting.done()
        proxy.heal()
        assert await asyncio.wait_for(waiting, PATIENCE_S) >= 1
        assert store.silent_s() == 0
    finally:
        await store.close()


@pytest.mark.usefixtures("no_time_outs")
async def test_what_takes_long_because_the_link_is_slow_gets_through(proxy: Proxy) -> None:
    """The probe is answered each time; doubting ever later lets the call through."""
    store = Store(f"redis://{proxy.address}/0", patience_s=None)
    try:
        proxy.set(Link(bytes_per_s=200_000))  # half a second for the bytes below
        await asyncio.wait_for(store.command("SET", "k", b"x" * 100_000), PATIENCE_S)
        assert await asyncio.wait_for(store.command("STRLEN", "k"), PATIENCE_S) == 100_000
    finally:
        await store.close()


async def test_a_subscription_hears_again_after_a_cut(
    proxy: Proxy, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allspark_bus.subscription.PING_S", 0.05)
    monkeypatch.setattr("allspark_bus.subscription.SILENCE_S", 0.5)
    monkeypatch.setattr("allspark_bus.subscription.CONNECT_TIMEOUT_S", 0.5)
    cut_off = Store(f"redis://{proxy.address}/0", patience_s=None)
    wakeups = Wakeups(cut_off)
    try:
        async with wakeups.watch("t/u") as event:
            await asyncio.wait_for(event.wait(), PATIENCE_S)
            proxy.set(FAULTS["cut-down"])
            event.clear()
            proxy.heal()
            await asyncio.wait_for(event.wait(), PATIENCE_S)  # subscribed again
            event.clear()
            await store.command("PUBLISH", keys.stream("t/u"), "1-0")
            await asyncio.wait_for(event.wait(), PATIENCE_S)
    finally:
        await wakeups.close()
        await cut_off.close()
