"""Views on a request's stream (R4): what GenerateStatus, GeneratedLength, Get and GetNoWait see."""

from collections.abc import Sequence
from dataclasses import dataclass

from allspark_proto import records

from allspark_bus import damage, keys
from allspark_bus.round_trip import Arg
from allspark_bus.scripts import ALLOW_OOM, NO_WRITES, Script
from allspark_bus.store import Store

TAKE = Script.load("take", ALLOW_OOM)
SETTLE = Script.load("settle", ALLOW_OOM)
READ = Script.load("read", NO_WRITES)
VIEW = Script.load("view", NO_WRITES)
STATUS = Script.load("status", ALLOW_OOM)

MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """What a read found. `outcome`: "ok", "busy", "unknown", "released" or "expired".

    Tokens `[start, end)` of the generated sequence; `end` is one more than their number once the tensors of
    the terminal record are among what was read. `status` is the terminal GENERATE_STATUS if there is nothing
    after `end`, else 0.
    """

    outcome: str
    start: int = 0
    end: int = 0
    tokens: tuple[int, ...] = ()
    tensors: tuple[tuple[str, bytes], ...] = ()
    status: int = 0
    reason: str = ""
    message: str = ""
    wait_ms: int = 0
    is_cut_off: bool = False  # there was more than MAX_ENTRIES

    @property
    def has_data(self) -> bool:
        return self.end > self.start or bool(self.tensors)


@dataclass(frozen=True, slots=True)
class View:
    """Where a request stands. `status` is the true GENERATE_STATUS; `end_ms` when it ended (0: open)."""

    outcome: str
    status: int = 0
    num_tokens: int = 0
    cursor: int = 0
    was_read: bool = False
    reason: str = ""
    message: str = ""
    end_ms: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What GenerateStatus answers: `status` with the reason and message of a terminal one."""

    outcome: str
    status: int = 0
    reason: str = ""
    message: str = ""


class Streams:
    """Typed access to the reading scripts."""

    def __init__(self, store: Store, *, reservation_ms: int = 2000) -> None:
        self._store = store
        self._reservation_ms = reservation_ms

    async def take(self, rid: str, call_id: str, confirmed: str) -> Batch:
        """Takes what the server-side cursor has not delivered.

        The cursor comes back after `reservation_ms` unless the call is settled (or confirmed by the
        next take), so an answer that was lost with its gateway is delivered again.
        """
        with damage.named(f"request {rid}"):
            args: list[Arg] = [call_id, confirmed, self._reservation_ms, MAX_ENTRIES]
            return _batch(await self._store.script(TAKE, _keys(rid), args))

    async def settle(self, rid: str, call_id: str, *, arrived: bool) -> None:
        """Confirms the delivery of a take, or takes it back."""
        await self._store.script(SETTLE, [keys.request(rid)], [call_id, 1 if arrived else 0])

    async def read(self, rid: str, position: int) -> Batch:
        """Reads from a position that the reader keeps itself: nothing moves, so nothing can be lost."""
        with damage.named(f"request {rid}"):
            return _batch(await self._store.script(READ, _keys(rid), [position, MAX_ENTRIES]))

    async def view(self, rid: str) -> View:
        """Status and length."""
        with damage.named(f"request {rid}"):
            return _view(await self._store.script(VIEW, _keys(rid), []))

    async def status(self, rid: str, confirmed: str, deferral_ms: int) -> Told:
        """The status for readers of the server-side cursor, who must see the last tokens before the end.

        `confirmed` is a call whose answer is known to have arrived, or "".
        """
        with damage.named(f"request {rid}"):
            r = await self._store.script(STATUS, _keys(rid), [confirmed, deferral_ms])
            if r[0] != b"ok":
                return Told(r[0].decode())
            return Told("ok", int(r[1]), r[2].decode(), r[3].decode())


def _keys(rid: str) -> list[str]:
    return [keys.request(rid), keys.stream(rid)]


def _check_continuous(found: Sequence[records.Record], start: int) -> None:
    at = min(start, found[0].position) if found else 0
    for record in found:
        if record.position != at:
            raise ValueError(f"its stream lacks the tokens [{at}, {record.position})")
        at = record.end


def _view(r: Sequence[bytes]) -> View:
    if r[0] != b"ok":
        return View(r[0].decode())
    num_tokens = int(r[1].partition(b"-")[0]) if r[1] else 0
    status = int(r[4]) if r[4] else (2 if num_tokens else 0)
    return View(
        "ok", status, num_tokens, int(r[2]), r[3] != b"", r[5].decode(), r[6].decode(), int(r[7] or 0)
    )


def _batch(reply: Sequence[bytes | int]) -> Batch:
    outcome = bytes(reply[0]).decode()
    if outcome == "busy":
        return Batch(outcome, wait_ms=int(reply[1]))
    if outcome == "damaged":
        raise ValueError("its stream lacks tokens")
    if outcome != "ok":
        return Batch(outcome)
    start, end = int(reply[1]), int(reply[2])
    found = [records.decode(m) for m in reply[6:] if isinstance(m, bytes)]
    _check_continuous(found, start)
    skip = max(0, start - found[0].position) if found else 0
    is_cut_off = len(found) == MAX_ENTRIES and not found[-1].is_terminal
    return Batch(
        outcome,
        start,
        end,
        tuple(records.tokens_of(found)[skip:]),
        tuple((k, v) for r in found for k, v in r.tensors.items()),
        0 if is_cut_off else int(reply[3] or 0),
        "" if is_cut_off else bytes(reply[4]).decode(),
        "" if is_cut_off else bytes(reply[5]).decode(),
        is_cut_off=is_cut_off,
    )
