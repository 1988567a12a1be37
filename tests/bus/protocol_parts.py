"""What the model check of the protocol is made of, apart from the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allspark_bus import keys
from allspark_bus.ledger import Entry, now_ms
from allspark_bus.losses import MAX_TAKEN_BACK
from allspark_bus.round_trip import Arg, Command
from allspark_bus.store import Store
from allspark_proto import records


@dataclass
class Session:
    """A worker that was handed the request: it goes on appending until the ledger tells it otherwise."""

    life: int
    epoch: int
    worker: str
    published: int


@dataclass
class Reader:
    """A client of the server-side cursor; `arrived` is the last call whose answer reached it."""

    received: list[int] = field(default_factory=list)
    arrived: str = ""
    reserved_by: str = ""
    reserved_ms: int = 0
    has_read: bool = False
    was_told: bool = False


@dataclass
class Deaths:
    """Of a request: `counted` has the epoch that was claimed and its worker; `last` how often in a row some
    were taken back, and with how many tokens.
    """

    counted: dict[int, str] = field(default_factory=dict)
    last: tuple[int, int] = (0, -1)

    def take_back(self, epoch: int, num_tokens: int) -> None:
        """The worker of this epoch lives."""
        times, at = self.last
        times = times + 1 if at == num_tokens else 1
        if epoch in self.counted and times <= MAX_TAKEN_BACK:
            del self.counted[epoch]
            self.last = times, num_tokens


def check_entries(found: Sequence[tuple[str, records.Record]]) -> int:
    """Of a raw stream, (id, record) each; returns the last epoch."""
    position, epoch = 0, 0
    for entry_id, record in found:
        assert record.position == position, "positions are contiguous"
        assert record.epoch >= epoch, "nobody with an older epoch comes after"
        position, epoch = record.end, record.epoch
        assert entry_id == f"{position}-{int(record.is_terminal)}"
    return epoch


def entry_of(rid: str, model: str, worker: str) -> Entry:
    """A request that is about to be admitted."""
    return Entry(rid, model, 1 if worker else 0, worker, b"body", now_ms(), 0, 0, 0, 0)


def token(life: int, position: int) -> int:
    """As with the real engine, a pure function of the request and the position, whoever generates it."""
    return life * 10_000 + position


async def shift(store: Store, rid: str, ms: int) -> None:
    """Moves every time stamp and TTL of a request back."""
    key = keys.request(rid)
    reservation, ended = await store.command("HMGET", key, "rs", "et")
    if reservation:
        call, start, at = reservation.decode().split("|")
        await store.command("HSET", key, "rs", f"{call}|{start}|{int(at) - ms}")
    if ended:
        await store.command("HSET", key, "et", int(ended) - ms)
    for k in (key, keys.stream(rid)):
        left = await store.command("PTTL", k)
        if left >= 0:
            await store.command("PEXPIRE", k, left - ms)  # at or below zero it expires at once


class SlowStore(Store):
    """What a process removes from the indexes, after a script has run, may reach Redis at any later time."""

    is_slow = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.late: list[Command] = []

    def _is_kept_back(self, command: Command) -> bool:
        if self.is_slow and command[0] in ("ZREM", "SREM"):
            self.late.append(command)
            return True
        return False

    async def command(self, *command: Arg) -> Any:
        return 0 if self._is_kept_back(command) else await super().command(*command)

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        return await super().batch([c for c in commands if not self._is_kept_back(c)])

    async def catch_up(self) -> None:
        self.is_slow = False
        late, self.late = self.late, []
        await self.batch(late)


async def open_store(url: str) -> SlowStore:
    """On the running loop."""
    return SlowStore(url)
