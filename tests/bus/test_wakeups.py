"""Wake-ups: what is published reaches its listeners, and a lost subscription is repaired by waking all."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from allspark_bus.ledger import Append, Ending, Entry, Ledger, Ttl, now_ms
from allspark_bus.round_trip import send
from allspark_bus.store import Store
from allspark_bus.wakeups import Wakeups
from redis.asyncio.connection import AbstractConnection

RID = "default/w-1"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not let run for a while is not replaced, except where that is the test."""
    monkeypatch.setattr("allspark_bus.subscription.SILENCE_S", 120.0)
    monkeypatch.setattr("allspark_bus.subscription.CONNECT_TIMEOUT_S", 60.0)


@pytest.fixture
async def wakeups(store: Store) -> AsyncIterator[Wakeups]:
    w = Wakeups(store)
    yield w
    await w.close()


@pytest.fixture
async def ledger(store: Store) -> Ledger:
    found = Ledger(store, Ttl())
    await found.admit(Entry(RID, "m", 1, "w", b"", now_ms(), 0, 0, 0, 0), b"d")
    return found


def listening(wakeups: Wakeups) -> asyncio.Queue[bytes]:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    wakeups.join(RID, heard.put_nowait)
    return heard


async def hear(heard: asyncio.Queue[bytes]) -> bytes:
    return await asyncio.wait_for(heard.get(), 60)


async def test_a_listener_hears_the_beginning_and_the_id_of_each_entry(
    wakeups: Wakeups, ledger: Ledger
) -> None:
    heard = listening(wakeups)
    assert await hear(heard) == b"", "listening began: look once"
    await ledger.append([Append(RID, "m", 1, 0, (5, 6))])
    assert await hear(heard) == b"2-0"
    await ledger.append([Append(RID, "m", 1, 2, (), Ending(3, "eos"))])
    assert await hear(heard) == b"2-1"
    await ledger.release(RID)
    assert await hear(heard) == b"released"


async def test_an_end_from_outside_is_published_as_the_terminal_entry(
    wakeups: Wakeups, ledger: Ledger
) -> None:
    heard = listening(wakeups)
    await hear(heard)
    await ledger.finish(RID, Ending(3, "stopped"))
    assert await hear(heard) == b"0-1"


async def test_who_joins_a_live_channel_looks_at_once(wakeups: Wakeups, ledger: Ledger) -> None:
    await hear(listening(wakeups))
    second = listening(wakeups)
    assert second.get_nowait() == b""


async def test_who_left_hears_nothing_and_others_go_on(wakeups: Wakeups, ledger: Ledger) -> None:
    gone: list[bytes] = []
    wakeups.join(RID, gone.append)
    heard = listening(wakeups)
    await hear(heard)
    wakeups.leave(RID, gone.append)
    before = len(gone)
    await ledger.append([Append(RID, "m", 1, 0, (5,))])
    assert await hear(heard) == b"1-0"
    assert len(gone) == before


async def test_a_restart_of_the_store_wakes_everybody(valkey, wakeups: Wakeups, ledger: Ledger) -> None:  # type: ignore[no-untyped-def]
    heard = listening(wakeups)
    await hear(heard)
    valkey.kill()
    valkey.start()
    assert await hear(heard) == b"", "the new subscription began: anything may have happened before"
    await ledger.append([Append(RID, "m", 1, 0, (5,))])
    assert await hear(heard) == b"1-0"


async def test_a_subscription_that_fell_silent_is_replaced(
    valkey, wakeups: Wakeups, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """A store that hangs keeps its connections open; parked readers must not wait for ever."""
    monkeypatch.setattr("allspark_bus.subscription.PING_S", 0.05)
    monkeypatch.setattr("allspark_bus.subscription.SILENCE_S", 0.15)
    heard = listening(wakeups)
    await hear(heard)
    valkey.process.send_signal(signal.SIGSTOP)
    try:
        while any(s.confirmed for s in wakeups._subscriptions.values()):
            await asyncio.sleep(0.001)  # until the silence has lasted too long
    finally:
        valkey.process.send_signal(signal.SIGCONT)
    assert await hear(heard) == b"", "a new subscription"
    await ledger.append([Append(RID, "m", 1, 0, (5,))])
    while (published := await hear(heard)) == b"":
        pass  # a slow machine can be silent for so long again
    assert published == b"1-0"


async def test_an_idle_connection_without_subscriptions_survives_its_probes(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to PING has another form while nothing is subscribed; it once ended the task for good."""
    monkeypatch.setattr("allspark_bus.subscription.PING_S", 0.01)
    monkeypatch.setattr("allspark_bus.wakeups.LINGER_S", 0.0)
    wakeups = Wakeups(store)
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    wakeups.join(RID, heard.put_nowait)
    await hear(heard)
    wakeups.leave(RID, heard.put_nowait)
    probes = asyncio.Event()
    monkeypatch.setattr("allspark_bus.subscription.send", _counting(5, probes))
    await asyncio.wait_for(probes.wait(), 60)

    again = listening(wakeups)
    assert await hear(again) == b""
    await ledger.append([Append(RID, "m", 1, 0, (5,))])
    assert await hear(again) == b"1-0"
    await wakeups.close()


Sending = Callable[[AbstractConnection, list[tuple[str, ...]]], Awaitable[None]]


def _counting(wanted: int, reached: asyncio.Event) -> Sending:
    """`send`, which sets the event once so many probes were sent."""
    seen = 0

    async def sending(connection: AbstractConnection, commands: list[tuple[str, ...]]) -> None:
        nonlocal seen
        seen += ("PING",) in commands
        if seen == wanted:
            reached.set()
        await send(connection, commands)

    return sending
