"""The ledger and the views on its streams, against the real Valkey."""

import asyncio

import pytest
from allspark_bus import keys
from allspark_bus.ledger import (
    APPENDED,
    CLOSED,
    GAP,
    RELEASE,
    STALE,
    Admission,
    Append,
    Ending,
    Entry,
    Ledger,
    Ttl,
    now_ms,
)
from allspark_bus.store import Store
from allspark_bus.streams import Streams, Told
from allspark_proto import records

RID = "default/u-1"


def entry(rid: str = RID, *, epoch: int = 1, worker: str = "w1", body: bytes = b"body") -> Entry:
    return Entry(rid, "m", epoch, worker, body, now_ms(), 0, 0, 0, 0)


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store, Ttl())


@pytest.fixture
def streams(store: Store) -> Streams:
    return Streams(store)


def append(position: int, *tokens: int, epoch: int = 1, ending: Ending | None = None) -> Append:
    return Append(RID, "m", epoch, position, tokens, ending)


async def test_the_same_request_sent_twice_is_recorded_once(ledger: Ledger) -> None:
    assert (await ledger.admit(entry(), b"d1")).outcome == "new"
    again = await ledger.admit(entry(epoch=7, worker="w2"), b"d1")
    assert (again.outcome, again.epoch, again.worker) == ("same", 1, "w1")
    assert (await ledger.admit(entry(), b"d2")).outcome == "conflict"
    assert await ledger.open_requests("m") == [RID]


async def test_a_conflict_under_another_model_leaves_no_index_entry(ledger: Ledger, store: Store) -> None:
    await ledger.admit(entry(), b"d1")
    other = Entry(RID, "other", 1, "w1", b"x", now_ms(), 0, 0, 0, 0)
    assert (await ledger.admit(other, b"d2")).outcome == "conflict"
    assert await ledger.num_open("other") == 0 and await ledger.num_open("m") == 1


async def test_append_is_fenced_by_epoch_and_position(ledger: Ledger, streams: Streams) -> None:
    await ledger.admit(entry(), b"d")
    assert await ledger.append([append(0, 10, 11)]) == [(APPENDED, 2)]
    assert await ledger.append([append(0, 10, 11)]) == [(APPENDED, 2)], "a repeated append changes nothing"
    assert await ledger.append([append(1, 11, 12)]) == [(GAP, 2)]
    assert await ledger.append([append(5, 12)]) == [(GAP, 2)]
    assert (await ledger.advance(RID, 1, "w2", died=True)).epoch == 2
    assert await ledger.append([append(2, 99)]) == [(STALE, 2)], "a zombie of epoch 1 is refused"
    assert await ledger.append([append(2, 12, epoch=2, ending=Ending(3, "eos"))]) == [(APPENDED, 3)]
    assert await ledger.append([append(3, 13, epoch=2)]) == [(CLOSED, 3)]
    assert await ledger.tokens(RID) == [10, 11, 12]
    view = await streams.view(RID)
    assert (view.status, view.num_tokens, view.reason) == (3, 3, "eos")
    assert await ledger.num_open("m") == 0


async def test_advance_is_a_compare_and_set_that_may_be_repeated(ledger: Ledger) -> None:
    await ledger.admit(entry(), b"d")
    first, second = await asyncio.gather(ledger.advance(RID, 1, "w2"), ledger.advance(RID, 1, "w3"))
    assert sorted([first.outcome, second.outcome]) == ["ok", "stale"]
    winner = "w2" if first.outcome == "ok" else "w3"
    again = await ledger.advance(RID, 1, winner)
    assert (again.outcome, again.epoch) == ("ok", 2)


async def test_worker_of_a_released_request_cannot_append_to_its_successor(ledger: Ledger) -> None:
    await ledger.admit(entry(), b"d1")
    assert (await ledger.advance(RID, 1, "w2")).epoch == 2
    await ledger.release(RID)
    assert await ledger.admit(entry(), b"d1") == Admission("new", 3, "w1")
    for old in (1, 2):
        assert await ledger.append([append(0, 99, epoch=old)]) == [(STALE, 0)]
    assert await ledger.append([append(0, 10, epoch=3)]) == [(APPENDED, 1)]


async def test_refused_end_of_a_zombie_leaves_the_request_to_those_who_look_for_orphans(
    ledger: Ledger,
) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.advance(RID, 1, "", died=True)
    assert await ledger.append([append(0, 9, ending=Ending(3, "eos"))]) == [(STALE, 0)]
    assert await ledger.open_requests("m") == [RID]
    assert await ledger.append([append(0, 9, epoch=2, ending=Ending(3, "eos"))]) == [(APPENDED, 1)]
    assert await ledger.open_requests("m") == []


async def test_copy_of_a_call_that_arrives_after_the_release_does_not_run_it_again(ledger: Ledger) -> None:
    sent = now_ms() - 1
    assert (await ledger.admit(entry(), b"d", sent)).outcome == "new"
    await ledger.release(RID)
    assert (await ledger.admit(entry(), b"d", sent)).outcome == "late"
    assert await ledger.num_open("m") == 0 and await ledger.tenant_requests("default") == []
    assert (await ledger.admit(entry(), b"d", now_ms())).outcome == "new", (
        "a call sent since then is another one"
    )


async def test_finish_ends_once_and_fences_the_worker(ledger: Ledger, streams: Streams) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 5)])
    assert await ledger.finish(RID, Ending(3, "stopped")) == ("ended", "w1")
    assert (await ledger.finish(RID, Ending(4, "poison")))[0] == "already"
    assert await ledger.append([append(1, 6)]) == [(CLOSED, 1)]
    batch = await streams.read(RID, 0)
    assert (batch.tokens, batch.status, batch.reason) == ((5,), 3, "stopped")


async def test_a_request_stopped_before_its_first_token_has_a_terminal_record(
    ledger: Ledger, store: Store, streams: Streams
) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.finish(RID, Ending(3, "stopped", "why"))
    [[entry_id, fields]] = await store.command("XRANGE", keys.stream(RID), "-", "+")
    assert entry_id == b"0-1"
    assert records.decode(fields[1]) == records.Record(2, 0, (), 3, "stopped", "why")
    assert (await streams.view(RID)).status == 3


async def test_release_that_was_cut_off_is_completed_by_its_repetition(ledger: Ledger, store: Store) -> None:
    await ledger.admit(entry(), b"d")
    await store.script(RELEASE, [keys.request(RID), keys.stream(RID)], [now_ms()])  # and here its broker died
    assert await ledger.tenant_requests("default") == [RID]
    assert await ledger.release(RID) == ("released", "", False)
    assert await ledger.tenant_requests("default") == []


async def test_release_leaves_a_tombstone_and_nothing_else(
    ledger: Ledger, store: Store, streams: Streams
) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 5)])
    assert await ledger.release(RID) == ("ok", "w1", True)
    assert await ledger.release(RID) == ("released", "", False)
    assert await ledger.release("default/other") == ("unknown", "", False)
    assert (await streams.view(RID)).outcome == "released"
    assert await store.command("KEYS", "*") == [keys.request(RID).encode()]
    assert 0 < await store.command("PTTL", keys.request(RID)) <= Ttl().tombstone_ms
    assert (await ledger.admit(entry(), b"d2")).outcome == "new", "a released uuid may be used again"


async def test_an_unread_result_expires_into_its_own_answer(store: Store, streams: Streams) -> None:
    ledger = Ledger(store, Ttl(result_ms=1, tombstone_ms=60_000))
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 5, ending=Ending(3, "eos"))])
    while await store.command("EXISTS", keys.stream(RID)):
        await asyncio.sleep(0.001)  # until Valkey's clock has passed the one millisecond
    assert (await streams.view(RID)).outcome == "expired"
    assert (await streams.take(RID, "c", "")).outcome == "expired"
    assert (await streams.read(RID, 0)).outcome == "expired"


async def test_take_moves_the_cursor_only_when_the_answer_arrived(ledger: Ledger, streams: Streams) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 1, 2)])
    first = await streams.take(RID, "a", "")
    assert (first.tokens, first.start, first.end) == ((1, 2), 0, 2)
    assert (await streams.take(RID, "b", "")).outcome == "busy", "the tokens of call a are still on their way"
    await streams.settle(RID, "a", arrived=False)
    assert (await streams.take(RID, "b", "")).tokens == (1, 2)
    await ledger.append([append(2, 3)])
    assert (await streams.take(RID, "c", "b")).tokens == (3,)
    assert (await streams.take(RID, "c", "")).tokens == (3,), "the same call repeated gets the same tokens"
    await streams.settle(RID, "c", arrived=True)
    assert (await streams.take(RID, "d", "")).tokens == ()


async def test_tokens_reserved_by_a_dead_gateway_come_back(store: Store, ledger: Ledger) -> None:
    streams = Streams(store, reservation_ms=1)
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 1, 2)])
    assert (await streams.take(RID, "dead", "")).tokens == (1, 2)
    while (batch := await streams.take(RID, "heir", "")).outcome == "busy":
        await asyncio.sleep(0.001)
    assert batch.tokens == (1, 2)


async def test_a_reader_with_its_own_cursor_starts_inside_an_entry(ledger: Ledger, streams: Streams) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 1, 2, 3)])
    await ledger.append([append(3, 4)])
    batch = await streams.read(RID, 2)
    assert (batch.tokens, batch.start, batch.end) == ((3, 4), 2, 4)
    assert (await streams.read(RID, 4)).tokens == ()


async def test_every_call_survives_a_restart_of_the_store(valkey, ledger: Ledger, store: Store) -> None:  # type: ignore[no-untyped-def]
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 1)])
    valkey.kill()
    pending = [asyncio.ensure_future(ledger.append([append(1, 2)])), asyncio.ensure_future(ledger.load(RID))]
    await asyncio.sleep(0.1)  # both calls meet a closed port before it comes back
    valkey.start()
    appended, loaded = await asyncio.gather(*pending)
    assert appended == [(APPENDED, 2)]
    assert loaded is not None
    assert await ledger.tokens(RID) == [1, 2]


async def test_a_store_that_is_away_answers_within_its_patience(valkey) -> None:  # type: ignore[no-untyped-def]
    from allspark_bus.errors import StoreUnavailable

    valkey.kill()
    impatient = Store(valkey.url, patience_s=0.1)
    with pytest.raises(StoreUnavailable, match="unreachable"):
        await impatient.command("PING")
    await impatient.close()


D_MS = 60_000


async def test_the_end_is_held_back_while_a_reader_has_tokens_to_fetch(
    ledger: Ledger, streams: Streams
) -> None:
    await ledger.admit(entry(), b"d")
    assert (await streams.status(RID, "", D_MS)).status == 0
    await ledger.append([append(0, 1)])
    assert (await streams.status(RID, "", D_MS)).status == 2
    await streams.take(RID, "a", "")
    await ledger.append([append(1, 2, ending=Ending(3, "eos", "why"))])
    assert (await streams.status(RID, "a", D_MS)).status == 2, "token 2 has not been fetched"
    await streams.take(RID, "b", "a")
    assert (await streams.status(RID, "", D_MS)).status == 2, "the answer of b may still be lost"
    assert await streams.status(RID, "b", D_MS) == Told("ok", 3, "eos", "why"), "b is known to have arrived"
    await streams.settle(RID, "b", arrived=True)
    assert (await streams.status(RID, "", D_MS)).status == 3


async def test_the_end_is_not_held_back_for_ever(ledger: Ledger, streams: Streams) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 1)])
    await streams.take(RID, "a", "")
    await ledger.append([append(1, 2, ending=Ending(4, "poison"))])
    while (await streams.status(RID, "a", 50)).status == 2:
        await asyncio.sleep(0.001)  # until Valkey's clock has passed the 50 milliseconds
    assert (await streams.status(RID, "a", D_MS)).status == 4, "once told, it stays told"


async def test_who_never_reads_sees_the_end_at_once_and_it_stays(ledger: Ledger, streams: Streams) -> None:
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 1, 2, ending=Ending(3, "eos"))])
    assert (await streams.status(RID, "", D_MS)).status == 3
    await streams.take(RID, "a", "")
    await streams.settle(RID, "a", arrived=False)
    assert (await streams.status(RID, "", D_MS)).status == 3, "a status never goes back"


async def test_the_status_of_what_is_gone(ledger: Ledger, streams: Streams, store: Store) -> None:
    assert (await streams.status(RID, "", D_MS)).outcome == "unknown"
    await ledger.admit(entry(), b"d")
    await ledger.append([append(0, 1, ending=Ending(3, "eos"))])
    await store.command("DEL", keys.stream(RID))
    assert (await streams.status(RID, "", D_MS)).outcome == "expired"
    await ledger.release(RID)
    assert (await streams.status(RID, "", D_MS)).outcome == "released"


async def test_the_end_is_not_announced_before_the_last_entry(
    ledger: Ledger, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allspark_bus.streams.MAX_ENTRIES", 2)
    await ledger.admit(entry(), b"d")
    for position in range(3):
        await ledger.append([append(position, position)])
    await ledger.append([append(3, 3, ending=Ending(3, "eos"))])
    first = await streams.read(RID, 0)
    assert (first.tokens, first.status, first.reason) == ((0, 1), 0, "")
    second = await streams.read(RID, 2)
    assert (second.tokens, second.status, second.reason) == ((2, 3), 3, "eos")
