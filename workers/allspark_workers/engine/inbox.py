"""Commands from other threads to the engine thread, in order, and which request ids are live."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from allspark_workers.engine.sequence import Sequence


class Verb(Enum):
    """What a command asks for."""

    SUBMIT = auto()
    CANCEL = auto()
    HOLD = auto()
    RESUME = auto()
    WAKE = auto()


@dataclass(frozen=True, slots=True)
class Command:
    """`sequence` is set for SUBMIT only."""

    verb: Verb
    request_id: str
    sequence: Sequence | None = None


class Inbox:
    """Thread-safe. A request id is live from its submission until the engine thread calls `ended`."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()
        self._live: dict[str, int] = {}

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; a newer epoch of a live id first ends the older one.

        Raises ValueError if the id is live with the same or a newer epoch.
        """
        key, epoch = sequence.request_id, sequence.request.epoch
        with self._condition:
            live = self._live.get(key)
            if live is not None and live >= epoch:
                raise ValueError(f"request {key} is already live here (epoch {live})")
            if live is not None:
                self._commands.append(Command(Verb.CANCEL, key))
            self._live[key] = epoch
            self._commands.append(Command(Verb.SUBMIT, key, sequence))
            self._condition.notify_all()

    def put(self, verb: Verb, request_id: str) -> None:
        """Queue a command for a request; ignored if the request is not live (it may just have ended)."""
        with self._condition:
            if request_id in self._live:
                self._commands.append(Command(verb, request_id))
                self._condition.notify_all()

    def wake(self) -> None:
        """Make the engine thread look around: something it waits for may have happened."""
        with self._condition:
            self._commands.append(Command(Verb.WAKE, ""))
            self._condition.notify_all()

    def take(self) -> list[Command]:
        """All commands so far."""
        if not self._commands:  # reading the length is atomic: an idle inbox costs no lock
            return []
        with self._condition:
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def ended(self, request_id: str, epoch: int) -> None:
        """The request is over; its id may be used again."""
        with self._condition:
            if self._live.get(request_id) == epoch:
                del self._live[request_id]

    def clear(self) -> None:
        """Forget everything."""
        with self._condition:
            self._commands.clear()
            self._live.clear()

    def __len__(self) -> int:
        return len(self._commands)

    def submitted(self) -> list[Sequence]:
        """Requests that the engine thread has not taken yet."""
        with self._condition:
            return [command.sequence for command in self._commands if command.sequence is not None]

    def wait(self, timeout_s: float) -> bool:
        """Block until there is a command, at most `timeout_s`; whether there is one."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._commands), timeout_s)
