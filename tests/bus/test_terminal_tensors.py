"""Tensors of a terminal record are read once, with or without tokens beside them, by every kind of reader."""

import pytest
from allspark_bus.ledger import Append, Ending, Entry, Ledger, Ttl, now_ms
from allspark_bus.store import Store
from allspark_bus.streams import Streams

RID = "default/u-1"
TENSORS = {"logits": b"1", "last_hidden_state": b"2"}
D_MS = 60_000


@pytest.fixture
async def ledger(store: Store) -> Ledger:
    ledger = Ledger(store, Ttl())
    await ledger.admit(Entry(RID, "m", 1, "w1", b"body", now_ms(), 0, 0, 0, 0), b"d")
    return ledger


@pytest.fixture
def streams(store: Store) -> Streams:
    return Streams(store)


def end(position: int, *tokens: int) -> Append:
    return Append(RID, "m", 1, position, tokens, Ending(3, "inferred"), TENSORS)


@pytest.mark.parametrize("before", [(), (7, 8)])
async def test_a_terminal_record_without_tokens_is_taken_once(
    before: tuple[int, ...], ledger: Ledger, streams: Streams
) -> None:
    n = len(before)
    if before:
        await ledger.append([Append(RID, "m", 1, 0, before)])
        assert (await streams.take(RID, "first", "")).tokens == before
        await streams.settle(RID, "first", arrived=True)
    await ledger.append([end(n)])
    assert (await streams.status(RID, "", D_MS)).status == (2 if before else 3), "held back for a reader"
    taken = await streams.take(RID, "a", "")
    assert (taken.tokens, dict(taken.tensors), taken.status) == ((), TENSORS, 3)
    assert (taken.start, taken.end) == (n, n + 1)
    assert (await streams.take(RID, "b", "")).outcome == "busy"
    await streams.settle(RID, "a", arrived=False)
    again = await streams.take(RID, "b", "")
    assert dict(again.tensors) == TENSORS, "the answer was lost"
    last = await streams.take(RID, "c", "b")
    assert (last.tokens, last.tensors, last.status, last.end) == ((), (), 3, n + 1)
    assert (await streams.status(RID, "", D_MS)).status == 3
    assert (await streams.view(RID)).num_tokens == n


async def test_tokens_and_tensors_of_one_record_come_together(ledger: Ledger, streams: Streams) -> None:
    await ledger.append([Append(RID, "m", 1, 0, (5,))])
    await ledger.append([end(1, 6, 7)])
    taken = await streams.take(RID, "a", "")
    assert (taken.tokens, dict(taken.tensors), taken.end) == ((5, 6, 7), TENSORS, 4)
    last = await streams.take(RID, "b", "a")
    assert (last.tokens, last.tensors, last.status) == ((), (), 3)


async def test_a_reader_with_its_own_cursor_gets_them_too(ledger: Ledger, streams: Streams) -> None:
    await ledger.append([Append(RID, "m", 1, 0, (5, 6))])
    assert not (await streams.read(RID, 2)).tensors
    await ledger.append([end(2)])
    for position in (0, 1, 2):
        found = await streams.read(RID, position)
        assert (found.tokens, dict(found.tensors), found.end) == ((5, 6)[position:], TENSORS, 3)
    after = await streams.read(RID, 3)
    assert (after.tokens, after.tensors, after.status, after.end) == ((), (), 3, 3)


async def test_an_end_without_tensors_is_as_before(ledger: Ledger, streams: Streams) -> None:
    await ledger.append([Append(RID, "m", 1, 0, (5, 6))])
    await ledger.append([Append(RID, "m", 1, 2, (), Ending(3, "stopped"))])
    taken = await streams.take(RID, "a", "")
    assert (taken.tokens, taken.end, taken.status) == ((5, 6), 2, 3)
    assert (await streams.read(RID, 2)).end == 2
