"""A store whose memory is full (`noeviction`): nothing new is recorded, what ends or frees works."""

from collections.abc import AsyncIterator

import pytest
from allspark_bus import keys
from allspark_bus.catalogue import Catalogue, ModelRecord, ModelState
from allspark_bus.ledger import APPENDED, FULL, Append, Ending, Entry, Ledger, now_ms
from allspark_bus.presence import Presence
from allspark_bus.store import Store
from allspark_bus.streams import Streams
from redis.exceptions import OutOfMemoryError

from tests.conftest import ValkeyProcess
from tests.topologies import fill_memory, free_memory


def entry(rid: str) -> Entry:
    return Entry(rid, "m", 5, "w1", b"body", now_ms(), 0, 0, 0, 0)


@pytest.fixture
async def ledger(valkey: ValkeyProcess, store: Store) -> AsyncIterator[Ledger]:
    """Has the running request default/a with one token; then the memory is full."""
    ledger = Ledger(store)
    await ledger.admit(entry("default/a"), b"a")
    assert await ledger.append([Append("default/a", "m", 5, 0, [10])]) == [(APPENDED, 1)]
    fill_memory(valkey.port)
    yield ledger


async def test_an_admission_is_refused_as_a_whole(ledger: Ledger, store: Store) -> None:
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            await ledger.admit(entry("default/new"), b"n")
    assert await store.command("EXISTS", keys.request("default/new")) == 0
    assert await ledger.open_requests("m") == await ledger.tenant_requests("default") == ["default/a"]


async def test_a_retry_of_an_accepted_request_gets_its_answer_again(ledger: Ledger) -> None:
    again = await ledger.admit(entry("default/a"), b"a")
    assert (again.outcome, again.epoch, again.worker) == ("same", 5, "w1")
    assert len(await ledger.open_entries("m")) == 1
    with pytest.raises(OutOfMemoryError):
        await ledger.admit(entry("default/a"), b"another body")
    assert len(await ledger.open_entries("m")) == 1


async def test_the_uuid_of_a_released_request_is_not_recorded_either(ledger: Ledger, store: Store) -> None:
    """The script begins with a deletion, after which an undeclared one may take all memory it wants."""
    await ledger.release("default/a")
    with pytest.raises(OutOfMemoryError):
        await ledger.admit(entry("default/a"), b"a")
    assert await store.command("HGET", keys.request("default/a"), "st") == b"released"


async def test_tokens_wait_but_an_end_is_appended(ledger: Ledger, valkey: ValkeyProcess) -> None:
    more = Append("default/a", "m", 5, 1, [11])
    assert await ledger.append([more]) == [(FULL, 0)]
    free_memory(valkey.port)
    assert await ledger.append([more]) == [(APPENDED, 2)]
    fill_memory(valkey.port)
    last = Append("default/a", "m", 5, 2, [12], Ending(3, "eos"))
    assert await ledger.append([last]) == [(APPENDED, 3)]
    assert await ledger.tokens("default/a") == [10, 11, 12] and await ledger.num_open("m") == 0


async def test_an_end_with_tensors_waits(ledger: Ledger) -> None:
    big = Append("default/a", "m", 5, 1, [], Ending(3, "inferred"), {"logits": b"0" * 1000})
    assert await ledger.append([big]) == [(FULL, 0)]


async def test_claims_ends_and_releases_work(ledger: Ledger) -> None:
    assert (await ledger.advance("default/a", 5, "", died=True)).epoch == 6
    assert (await ledger.advance("default/a", 6, "w2")).epoch == 7
    assert await ledger.finish("default/a", Ending(3, "stopped")) == ("ended", "w2")
    assert await ledger.release("default/a") == ("ok", "w2", False)
    assert await ledger.open_requests("m") == await ledger.tenant_requests("default") == []


async def test_results_are_read_with_both_kinds_of_cursor(ledger: Ledger, store: Store) -> None:
    streams = Streams(store)
    assert (await streams.read("default/a", 0)).tokens == (10,)
    assert (await streams.take("default/a", "call", "")).tokens == (10,)
    await streams.settle("default/a", "call", arrived=True)
    assert (await streams.take("default/a", "next", "")).tokens == ()
    assert (await streams.status("default/a", "", 0)).status == 2
    assert (await streams.view("default/a")).num_tokens == 1


async def test_models_change_and_brokers_stay_known(ledger: Ledger, store: Store) -> None:
    catalogue = Catalogue(store)
    built = await catalogue.put(ModelRecord("m", b"", ModelState.BUILT, 0))
    assert built is not None and await catalogue.all() == {"m": built}
    presence = Presence(store, "b1", 10.0)
    assert (await presence.renew()).was_known is False
    assert (await presence.renew()).was_known is True
