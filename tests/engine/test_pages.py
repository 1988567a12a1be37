"""The page ledger balances after any sequence of operations."""

from __future__ import annotations

import pytest
from allspark_workers.engine.errors import LedgerError
from allspark_workers.engine.pages import PageLedger
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

TOTAL = 13
SPANS = st.lists(st.integers(0, TOTAL - 1), max_size=5, unique=True)
OWNERS = st.sampled_from(["a", "b", "c", "d"])


class LedgerMachine(RuleBasedStateMachine):
    """Compare the ledger with a dictionary of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(TOTAL)
        self.model: dict[str, set[int]] = {}

    def held(self) -> set[int]:
        return set().union(*self.model.values()) if self.model else set()

    def put(self, owner: str, spans: set[int]) -> None:
        self.model.pop(owner, None)
        if spans:
            self.model[owner] = spans

    @rule(owner=OWNERS, count=st.integers(0, 8))
    def allocate(self, owner: str, count: int) -> None:
        held = self.held()
        spans = self.ledger.allocate(owner, count)
        if count > TOTAL - len(held):
            assert spans is None
            return
        assert spans is not None and len(spans) == len(set(spans)) == count
        assert not held & set(spans)
        self.put(owner, self.model.get(owner, set()) | set(spans))

    @rule(owner=OWNERS, spans=SPANS)
    def share(self, owner: str, spans: list[int]) -> None:
        own = self.model.get(owner, set())
        if set(spans) <= self.held() - own:
            self.ledger.share(owner, spans)
            self.put(owner, own | set(spans))
        else:
            with pytest.raises(LedgerError):
                self.ledger.share(owner, spans)

    @rule(owner=OWNERS, spans=SPANS)
    def drop(self, owner: str, spans: list[int]) -> None:
        own = self.model.get(owner, set())
        if set(spans) <= own:
            self.ledger.drop(owner, spans)
            self.put(owner, own - set(spans))
        else:
            with pytest.raises(LedgerError):
                self.ledger.drop(owner, spans)

    @rule(holdings=st.dictionaries(OWNERS, SPANS))
    def exchange(self, holdings: dict[str, list[int]]) -> None:
        if set().union(*holdings.values()) <= self.held():
            self.ledger.exchange(holdings)
            for owner, spans in holdings.items():
                self.put(owner, set(spans))
        else:
            with pytest.raises(LedgerError):
                self.ledger.exchange(holdings)

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        assert self.ledger.release(owner) == len(self.model.pop(owner, set()))

    @rule(owners=st.sets(OWNERS))
    def foresee(self, owners: set[str]) -> None:
        others = [spans for owner, spans in self.model.items() if owner not in owners]
        kept = set().union(*others) if others else set()
        assert self.ledger.num_releasable(owners) == len(self.held() - kept)

    @invariant()
    def balances(self) -> None:
        self.ledger.check()
        held = len(self.held())
        assert (self.ledger.used, self.ledger.free) == (held, TOTAL - held)
        assert self.ledger.owners() == set(self.model)
        assert all(self.ledger.held_by(name) == len(spans) for name, spans in self.model.items())
        for span in range(TOTAL):
            holders = sum(span in spans for spans in self.model.values())
            assert self.ledger.num_holders(span) == holders
            assert self.ledger.is_shared(span) == (holders > 1)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_every_span_is_handed_out_once() -> None:
    ledger = PageLedger(5)
    spans = ledger.allocate("a", 5)
    assert spans is not None and sorted(spans) == [0, 1, 2, 3, 4]
    assert ledger.allocate("b", 1) is None
    assert ledger.release("a") == 5
    assert ledger.release("a") == 0


def test_a_lost_span_is_found() -> None:
    ledger = PageLedger(4)
    ledger.allocate("a", 2)
    ledger._free.pop()
    with pytest.raises(LedgerError, match="!= 4"):
        ledger.check()


def test_a_doubled_span_is_found() -> None:
    ledger = PageLedger(4)
    ledger.allocate("a", 2)
    ledger._free[0] = ledger._held["a"][0]
    with pytest.raises(LedgerError, match="free and held"):
        ledger.check()


def test_a_wrong_count_is_found() -> None:
    ledger = PageLedger(4)
    spans = ledger.allocate("a", 2)
    assert spans is not None
    ledger.share("b", spans)
    ledger._counts[spans[0]] = 1
    with pytest.raises(LedgerError, match="counts 1 holders, 2 hold it"):
        ledger.check()


def test_a_shared_span_is_free_only_after_its_last_holder() -> None:
    ledger = PageLedger(3)
    spans = ledger.allocate("prompt", 2)
    assert spans is not None
    ledger.share("twin", spans)
    assert ledger.release("prompt") == 2 and ledger.free == 1
    ledger.drop("twin", spans[:1])
    assert ledger.free == 2
    assert ledger.release("twin") == 1 and ledger.free == 3


@pytest.mark.parametrize("total", [0, -1])
def test_an_empty_pool_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match="at least one span"):
        PageLedger(total)
