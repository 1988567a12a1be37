"""The page ledger balances after any sequence of operations."""

from __future__ import annotations

import pytest
from allspark_workers.engine.errors import LedgerError
from allspark_workers.engine.pages import PageLedger
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

OWNERS = st.sampled_from(["a", "b", "c", "d"])


class LedgerMachine(RuleBasedStateMachine):
    """Compare the ledger with a dictionary of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(13)
        self.model: dict[str, set[int]] = {}

    @rule(owner=OWNERS, count=st.integers(0, 8))
    def allocate(self, owner: str, count: int) -> None:
        free = 13 - sum(map(len, self.model.values()))
        spans = self.ledger.allocate(owner, count)
        if count > free:
            assert spans is None
            return
        assert spans is not None and len(spans) == count
        taken = set().union(*self.model.values()) if self.model else set()
        assert not taken & set(spans)
        if spans:
            self.model.setdefault(owner, set()).update(spans)

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        assert self.ledger.release(owner) == len(self.model.pop(owner, set()))

    @invariant()
    def balances(self) -> None:
        self.ledger.check()
        held = sum(map(len, self.model.values()))
        assert (self.ledger.used, self.ledger.free) == (held, 13 - held)
        assert self.ledger.owners() == set(self.model)
        assert all(self.ledger.held_by(name) == len(spans) for name, spans in self.model.items())


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
    with pytest.raises(LedgerError, match="held twice"):
        ledger.check()


@pytest.mark.parametrize("total", [0, -1])
def test_an_empty_pool_is_refused(total: int) -> None:
    with pytest.raises(ValueError, match="at least one span"):
        PageLedger(total)
