"""What the model check of the protocol is made of, apart from the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from allspark_bus.round_trip import Arg, Command
from allspark_bus.store import Store


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


def token(life: int, position: int) -> int:
    """As with the real engine, a pure function of the request and the position, whoever generates it."""
    return life * 10_000 + position


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
