"""The protocol of ledger and streams, model-checked: a plain Python model against the real scripts in Valkey.

Hypothesis explores interleavings of admission, dispatch, claim, append (also by zombies, repeated or out of
place), deaths that are taken back, stop, release, expiry, index entries that are removed late, and reads
whose answers are lost. The model says what each step must answer; after every step the raw keys must hold.
Time is simulated: a tick moves every time stamp and TTL that the scripts left back by as much, and all
periods are far longer than the test takes.

ALLSPARK_MODEL_EXAMPLES=5000 explores longer, with new seeds each time; a failure prints its steps.
"""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

import hypothesis.strategies as st
from allspark_bus import keys
from allspark_bus.ledger import APPENDED, CLOSED, GAP, STALE, Append, Ending, Holder, Ledger, Ttl
from allspark_bus.losses import Suspect
from allspark_bus.streams import Streams
from allspark_proto import records
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.bus.protocol_parts import (
    Deaths,
    Reader,
    Session,
    SlowStore,
    check_entries,
    entry_of,
    open_store,
    shift,
    token,
)
from tests.conftest import ValkeyProcess

RID = "default/u"
MODEL = "m"
TICK_MS = 100_000
DEFERRAL_MS, RESERVATION_MS, RESULT_MS, TOMBSTONE_MS = 3 * TICK_MS, 5 * TICK_MS, 100 * TICK_MS, 40 * TICK_MS
TTL = Ttl(RESULT_MS, TOMBSTONE_MS)
MAX_DEATHS = 2
LONG_RUN = int(os.environ.get("ALLSPARK_MODEL_EXAMPLES", "0"))

workers = st.sampled_from(["w1", "w2"])
brokers = st.sampled_from(["b1", "b2"])
picks = st.integers(0, 1 << 16)


class Protocol(RuleBasedStateMachine):
    """One uuid through any number of lives: admitted, ended, released, admitted again."""

    def __init__(self, runner: asyncio.Runner, store: SlowStore) -> None:
        super().__init__()
        self._runner, self.store = runner, store
        self.ledgers = {b: Ledger(store, TTL, b) for b in ("b1", "b2")}
        self.ledger, self.streams = Ledger(store, TTL), Streams(store, reservation_ms=RESERVATION_MS)
        self.broker = ""  # that answers for the request
        self.now = 0
        self.state, self.life, self.epoch, self.worker = "absent", 0, 0, ""
        self.deaths = Deaths()
        self.tokens: list[int] = []
        self.since = 0  # when it ended or was released
        self.highest = -1  # epoch in all lives that a tombstone joins
        self.seen: list[int] = [0]  # epochs that some broker believes in
        self.sessions: list[Session] = []
        self.reader = Reader()
        self.calls = 0
        self.is_doubted = False

    def do(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(step)

    @initialize()
    def an_empty_store(self) -> None:
        self.store.is_slow, self.store.late = False, []
        self.do(self.store.command("FLUSHALL"))

    @rule(is_slow=st.booleans())
    def index_removals(self, is_slow: bool) -> None:
        """They are kept back from now on, or arrive."""
        self.do(self.store.catch_up())
        self.store.is_slow = is_slow

    @property
    def is_expired(self) -> bool:
        return self.state == "ended" and self.now - self.since >= RESULT_MS

    # What brokers do

    @rule(
        worker=st.sampled_from(["", "w1", "w2"]),
        broker=brokers,
        digest=st.sampled_from([b"d1", b"d1", b"d2"]),
    )
    def admit(self, worker: str, broker: str, digest: bytes) -> None:
        ledger = self.ledgers[broker]
        entry = entry_of(RID, MODEL, worker)
        admission = self.do(ledger.admit(entry, digest))
        if self.state in ("open", "ended"):
            expected = "same" if digest == self.digest else "conflict"
            assert (admission.outcome, admission.epoch) == (expected, self.epoch)
            return
        assert (admission.outcome, admission.worker) == ("new", worker)
        assert admission.epoch > self.highest, "an epoch of an earlier life is valid again"
        # The reply may be lost and the same admission sent again.
        again = self.do(ledger.admit(entry, digest))
        assert (again.outcome, again.epoch) == ("same", admission.epoch)
        self.state, self.life, self.digest = "open", self.life + 1, digest
        self.epoch = self.highest = admission.epoch
        self.worker, self.deaths, self.tokens, self.reader = worker, Deaths(), [], Reader()
        self.broker = broker
        self.seen.append(self.epoch)
        if worker:
            self.sessions.append(Session(self.life, self.epoch, worker, 0))

    @rule(worker=workers, broker=brokers, pick=picks)
    def dispatch(self, worker: str, broker: str, pick: int) -> None:
        """By any broker, with whatever epoch it has seen last."""
        if self._advance(self.seen[-1 - pick % min(4, len(self.seen))], worker, broker, died=False):
            assert self.do(self.ledger.tokens(RID)) == self.tokens, "what the worker continues from"
            self.sessions.append(Session(self.life, self.epoch, worker, len(self.tokens)))

    @rule(broker=brokers, pick=picks, died=st.booleans())
    def claim(self, broker: str, pick: int, died: bool) -> None:
        """A worker refused, said goodbye, or (`died`) was silent for too long: it may yet wake up."""
        if not self._advance(self.seen[-1 - pick % min(4, len(self.seen))], "", broker, died=died):
            return
        self.is_doubted = len(self.deaths.counted) >= MAX_DEATHS

    @precondition(lambda self: self.is_doubted)
    @rule()
    def decide(self) -> None:
        """The broker that holds the request looks whether a worker has come back."""
        self.is_doubted = False
        [suspect] = self.do(self.ledger.losses.suspects([RID]))
        if self.state != "open":
            assert suspect is None
            return
        assert suspect == Suspect(self.epoch, len(self.deaths.counted), tuple(self.deaths.counted.items()), 0)
        if suspect.deaths >= MAX_DEATHS:
            self._finish(Ending(4, "poison"))

    def _advance(self, expected: int, worker: str, broker: str, *, died: bool) -> bool:
        """Returns whether the caller may act on it."""
        ledger = self.ledgers[broker]
        got = self.do(ledger.advance(RID, expected, worker, died=died))
        if self.state != "open":
            assert got.outcome == "gone"
            return False
        is_repeated = (expected + 1, worker, broker) == (self.epoch, self.worker, self.broker)
        if expected != self.epoch and not is_repeated:
            assert (got.outcome, got.epoch) == ("stale", self.epoch)
            self.seen.append(got.epoch)
            return False
        if not is_repeated:
            if died:
                self.deaths.counted[self.epoch] = self.worker
            self.epoch, self.worker = self.epoch + 1, worker
            self.broker = broker
            self.highest = self.epoch
            self.seen.append(self.epoch)
        answer = ("ok", self.epoch, worker, len(self.deaths.counted), len(self.tokens))
        assert (got.outcome, got.epoch, got.worker, got.deaths, got.num_tokens) == answer
        again = self.do(ledger.advance(RID, expected, worker, died=died))
        assert again == got, "a repeat after a lost reply answers the same and counts no second death"
        return True

    @rule()
    def stop(self) -> None:
        self._finish(Ending(3, "stopped"))

    def _finish(self, ending: Ending) -> None:
        outcome, _ = self.do(self.ledger.finish(RID, ending))
        expected = {"open": "ended", "ended": "already", "released": "released", "absent": "unknown"}
        assert outcome == expected[self.state]
        if self.state == "open":
            self._ended(self.epoch + 1)

    def _ended(self, epoch: int) -> None:
        self.state, self.since = "ended", self.now
        self.epoch = self.highest = epoch

    @precondition(lambda self: self.state != "absent")
    @rule()
    def release(self) -> None:
        outcome, worker, was_open = self.do(self.ledger.release(RID))
        if self.state == "released":
            assert outcome == "released"
            return
        assert (outcome, worker, was_open) == ("ok", self.worker, self.state == "open")
        assert self.do(self.ledger.release(RID))[0] == "released"
        self.state, self.since = "released", self.now

    # What workers do, also those that nobody believes to be alive

    @precondition(lambda self: self.sessions)
    @rule(
        pick=picks,
        count=st.integers(0, 3),
        place=st.sampled_from(["next", "next", "next", "back", "ahead"]),
        ends=st.sampled_from([False, False, False, True]),
    )
    def append(self, pick: int, count: int, place: str, ends: bool) -> None:
        s = self.sessions[-1 - pick % min(6, len(self.sessions))]
        position = max(0, s.published + {"next": 0, "back": -1, "ahead": 1}[place])
        if count == 0 and not ends:
            count = 1
        new = [token(s.life, position + i) for i in range(count)]
        step = Append(RID, MODEL, s.epoch, position, new, Ending(3, "length") if ends else None)
        [(code, length)] = self.do(self.ledger.append([step]))
        expected = self._expected_code(s, position, count, ends)
        assert code == expected, (s, position, count, ends)
        if expected == APPENDED and position == len(self.tokens):
            self.tokens += new
            if ends:
                self._ended(self.epoch)
        if code == APPENDED:
            s.published = position + count
            [(again, _)] = self.do(self.ledger.append([step]))
            assert again == (CLOSED if ends else APPENDED), "a repeat after a lost reply changes nothing"
        elif code == GAP:
            assert length == len(self.tokens)
            s.published = length

    @precondition(lambda self: self.sessions)
    @rule(pick=picks)
    def a_worker_says_that_it_lives(self, pick: int) -> None:
        """At any time, also if nobody doubted it, or long after the request has ended or come again."""
        s = self.sessions[-1 - pick % min(6, len(self.sessions))]
        is_open = self.state == "open"
        if is_open:
            self.deaths.take_back(s.epoch, len(self.tokens))
        for _ in range(2):  # its reply may be lost
            assert self.do(self.ledger.losses.survived([(RID, s.epoch)])) == [
                is_open and s.epoch == self.epoch
            ]

    def _expected_code(self, s: Session, position: int, count: int, ends: bool) -> int:
        if self.state != "open":
            return CLOSED
        if (s.life, s.epoch) != (self.life, self.epoch):
            return STALE
        if position == len(self.tokens):
            return APPENDED
        return APPENDED if position + count <= len(self.tokens) and not ends else GAP

    # What clients do

    @rule(fate=st.sampled_from(["settled", "unsettled", "refused", "lost"]))
    def take(self, fate: str) -> None:
        """`refused`: the gateway sees that its answer did not arrive. `lost`: it died with its answer."""
        self.calls += 1
        call, r = f"c{self.calls}", self.reader
        batch = self.do(self.streams.take(RID, call, r.arrived))
        if self._not_readable(batch.outcome):
            return
        is_held = r.reserved_by not in ("", r.arrived) and self.now - r.reserved_ms < RESERVATION_MS
        assert batch.outcome == ("busy" if is_held else "ok")
        if is_held:
            return
        r.has_read = True
        assert batch.start == len(r.received), "a token was skipped or delivered twice"
        assert list(batch.tokens) == self.tokens[batch.start :]
        assert bool(batch.status) == (self.state == "ended")
        r.reserved_by, r.reserved_ms = (call, self.now) if batch.has_data else ("", 0)
        if fate in ("settled", "unsettled"):
            r.received += batch.tokens
            r.arrived = call
        if fate in ("settled", "refused"):
            self.do(self.streams.settle(RID, call, arrived=fate == "settled"))
            r.reserved_by = ""

    @precondition(lambda self: self.calls > 1)
    @rule(pick=picks)
    def a_gateway_gives_up_late(self, pick: int) -> None:
        """It takes back a call that has been settled, confirmed or overtaken."""
        call = f"c{1 + pick % self.calls}"
        if call != self.reader.reserved_by:
            self.do(self.streams.settle(RID, call, arrived=False))

    @rule(pick=picks)
    def read(self, pick: int) -> None:
        """A reader with its own cursor, at any place, as often as it likes."""
        start = pick % (len(self.tokens) + 1)
        batch = self.do(self.streams.read(RID, start))
        if not self._not_readable(batch.outcome):
            assert (batch.outcome, batch.start, batch.end) == ("ok", start, len(self.tokens))
            assert list(batch.tokens) == self.tokens[start:]
            assert bool(batch.status) == (self.state == "ended")

    @rule()
    def status(self) -> None:
        """A loop of Get and GenerateStatus misses nothing: the end waits a while for who reads."""
        r = self.reader
        told = self.do(self.streams.status(RID, r.arrived, DEFERRAL_MS))
        if self._not_readable(told.outcome):
            return
        is_deferred = r.has_read and not r.was_told and self.now - self.since < DEFERRAL_MS
        if self.state == "open" or (len(r.received) < len(self.tokens) and is_deferred):
            assert told.status == (2 if self.tokens else 0)
            return
        assert told.status in (3, 4)
        r.was_told = r.was_told or len(r.received) < len(self.tokens)

    @rule()
    def view(self) -> None:
        view = self.do(self.streams.view(RID))
        if not self._not_readable(view.outcome):
            assert view.num_tokens == len(self.tokens)
            assert (view.status in (3, 4)) == (self.state == "ended")

    def _not_readable(self, outcome: str) -> bool:
        """Unknown, released and expired are three different answers."""
        why = {"absent": "unknown", "released": "released"}.get(self.state, "expired")
        is_gone = self.state in ("absent", "released") or self.is_expired
        assert not is_gone or outcome == why
        return is_gone

    # Time

    @rule(ticks=st.sampled_from([1, 5, 5, 5, 40, 100, 140]))
    def tick(self, ticks: int) -> None:
        self.now += ticks * TICK_MS
        self.do(shift(self.store, RID, ticks * TICK_MS))
        age = self.now - self.since
        if (self.state == "released" and age >= TOMBSTONE_MS) or (
            self.state == "ended" and age >= RESULT_MS + TOMBSTONE_MS
        ):
            # Nobody remembers the uuid, so nobody can fence who had it: the promise ends here.
            self.state, self.sessions, self.seen, self.highest, self.reader = "absent", [], [0], -1, Reader()

    # What holds after every step

    @invariant()
    def the_raw_keys_hold(self) -> None:
        self.do(self._check())

    async def _check(self) -> None:
        fields = await self.store.command("HGETALL", keys.request(RID))
        h = dict(zip(fields[::2], fields[1::2], strict=True))
        assert h.get(b"st", b"absent").decode() == self.state
        found = [
            (i.decode(), records.decode(f[1]))
            for i, f in await self.store.command("XRANGE", keys.stream(RID), "-", "+")
        ]
        if self.state in ("absent", "released") or self.is_expired:
            assert not found
            return
        epoch = check_entries(found)
        assert records.tokens_of([r for _, r in found]) == self.tokens
        assert self.tokens == [token(self.life, i) for i in range(len(self.tokens))]
        assert (int(h[b"n"]), int(h[b"ep"])) == (len(self.tokens), self.epoch)
        assert epoch <= self.epoch
        terminal = [r for _, r in found if r.is_terminal]
        assert len(terminal) == (self.state == "ended") and terminal == [r for _, r in found[-1:] if terminal]
        if self.state == "open":
            assert await self.ledger.open_requests(MODEL) == [RID], "whoever looks for orphans finds it"
            assert await self.ledger.tenant_requests("default") == [RID]
            found = await self.ledger.holders(await self.ledger.open_entries(MODEL))
            assert [h for h in found if h is not None] == [Holder(self.epoch, self.worker, self.broker)]
            [suspect] = await self.ledger.losses.suspects([RID])
            assert suspect == Suspect(
                self.epoch, len(self.deaths.counted), tuple(self.deaths.counted.items()), 0
            )

    def teardown(self) -> None:
        """However it went: it ends, its reader gets the rest once, and nothing of it stays."""
        self.do(self.store.catch_up())
        if self.state in ("open", "ended") and not self.is_expired:
            self.stop()
            self.tick(5)
            if not self.is_expired:
                self.take("settled")
                assert self.reader.received == self.tokens
        if self.state in ("open", "ended"):
            self.release()
        self.tick(140)
        assert self.do(self.store.command("KEYS", keys.request("*"))) == []
        assert self.do(self.store.command("KEYS", keys.stream("*"))) == []
        assert self.do(self.ledger.open_entries(MODEL)) == []
        super().teardown()


def test_no_interleaving_loses_doubles_or_mixes_tokens(valkey: ValkeyProcess) -> None:
    profile = settings(
        max_examples=LONG_RUN or 100,
        stateful_step_count=100 if LONG_RUN else 40,
        derandomize=not LONG_RUN,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    with asyncio.Runner() as runner:
        store = runner.run(open_store(valkey.url))
        try:
            run_state_machine_as_test(lambda: Protocol(runner, store), settings=profile)
        finally:
            runner.run(store.close())
