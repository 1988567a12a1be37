"""Deaths of workers in the ledger, and how those that live take them back."""

import pytest
from allspark_bus import keys
from allspark_bus.errors import Damaged
from allspark_bus.ledger import APPENDED, Append, Ending, Entry, Ledger, now_ms
from allspark_bus.losses import MAX_TAKEN_BACK, Suspect
from allspark_bus.store import Store

RID = "default/u"


@pytest.fixture
async def ledger(store: Store) -> Ledger:
    """Has the request, held by a worker w1 with a blank in its name, at epoch 1."""
    ledger = Ledger(store, broker="b")
    await ledger.admit(Entry(RID, "m", 1, "w 1", b"body", now_ms(), 77, 0, 0, 0), b"d")
    return ledger


async def lost(ledger: Ledger, epoch: int) -> int:
    """Its worker is taken for dead, and the request goes to the next one; the deaths that count."""
    claim = await ledger.advance(RID, epoch, "", died=True)
    assert (claim.outcome, claim.epoch) == ("ok", epoch + 1)
    assert (await ledger.advance(RID, epoch + 1, f"w{epoch + 2}")).outcome == "ok"
    return claim.deaths


async def suspect(ledger: Ledger) -> Suspect:
    [found] = await ledger.losses.suspects([RID])
    assert isinstance(found, Suspect)
    return found


async def test_a_worker_that_lives_takes_its_death_back_once(ledger: Ledger) -> None:
    assert await ledger.losses.survived([(RID, 1)]) == [True], "nobody claimed anything"
    assert await lost(ledger, 1) == 1
    assert await lost(ledger, 3) == 2
    assert await suspect(ledger) == Suspect(5, 2, ((1, "w_1"), (3, "w3")), 77)
    for _ in range(2):
        assert await ledger.losses.survived([(RID, 1)]) == [False]
        assert await suspect(ledger) == Suspect(5, 1, ((3, "w3"),), 77)
    assert await ledger.losses.survived([(RID, 5), (RID, 3), (RID, 2)]) == [True, False, False]
    assert (await suspect(ledger)).deaths == 0
    assert await lost(ledger, 5) == 1, "and what comes later counts again"


async def test_a_claim_that_is_no_death_leaves_nothing_to_take_back(ledger: Ledger) -> None:
    await lost(ledger, 1)
    assert (await ledger.advance(RID, 3, "")).outcome == "ok"
    assert await ledger.losses.survived([(RID, 3)]) == [False]
    assert (await suspect(ledger)).lost == ((1, "w_1"),)


async def test_a_request_that_makes_every_worker_fall_silent_for_a_while_is_not_forgiven_for_ever(
    ledger: Ledger,
) -> None:
    epoch = 1
    for _ in range(MAX_TAKEN_BACK):
        assert await lost(ledger, epoch) == 1
        await ledger.losses.survived([(RID, epoch)])
        epoch += 2
    assert await ledger.append([Append(RID, "m", epoch, 0, [5])]) == [(APPENDED, 1)]
    for _ in range(MAX_TAKEN_BACK):
        assert await lost(ledger, epoch) == 1, "it has got on since: the count begins again"
        await ledger.losses.survived([(RID, epoch)])
        epoch += 2
    for deaths in (1, 2):
        assert await lost(ledger, epoch) == deaths
        assert await ledger.losses.survived([(RID, epoch)]) == [False]
        epoch += 2
    assert (await suspect(ledger)).deaths == 2


async def test_who_took_a_request_for_lost_cannot_change_its_end_nor_its_successor(
    ledger: Ledger, store: Store
) -> None:
    await lost(ledger, 1)
    await ledger.finish(RID, Ending(4, "poison"))
    assert await ledger.losses.survived([(RID, 1), ("default/unknown", 1)]) == [False, False]
    assert await ledger.losses.suspects([RID, "default/unknown"]) == [None, None]
    assert await store.command("HGET", keys.request(RID), "dt") == b"1"
    await ledger.release(RID)
    await ledger.admit(Entry(RID, "m", 1, "w9", b"body", now_ms(), 0, 0, 0, 0), b"d")
    found = await suspect(ledger)
    await lost(ledger, found.epoch)
    assert await ledger.losses.survived([(RID, 1), (RID, 3)]) == [False, False]
    assert [worker for _, worker in (await suspect(ledger)).lost] == ["w9"]


async def test_a_damaged_record_says_so(ledger: Ledger, store: Store) -> None:
    await store.command("HSET", keys.request(RID), "dt", "many", "de", "2=w ? =x", "ep", 5)
    [found] = await ledger.losses.suspects([RID])
    assert isinstance(found, Damaged) and RID in found.reason
    assert await ledger.losses.survived([(RID, 2), (RID, 3)]) == [True, False], "an append will tell"
    assert await ledger.losses.answering([RID, "default/unknown"]) == ["b", ""]
