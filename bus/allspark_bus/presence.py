"""Which brokers live: each says so in Redis, and whoever has been silent there too long is gone."""

from dataclasses import dataclass
from typing import Any

from allspark_bus import keys
from allspark_bus.scripts import ALLOW_OOM, Script
from allspark_bus.store import Store

PRESENCE = Script.load("presence", ALLOW_OOM)


@dataclass(frozen=True, slots=True)
class Present:
    """The brokers that live, the caller among them.

    `was_known`: the caller was one of them before. If not, the others may have been unable to speak as well.
    """

    brokers: frozenset[str]
    was_known: bool


class Presence:
    """Of one broker. `ttl_s`: silence after which it counts as gone."""

    def __init__(self, store: Store, broker_id: str, ttl_s: float) -> None:
        self._store = store
        self._broker_id = broker_id
        self._ttl_ms = int(ttl_s * 1000)

    async def renew(self) -> Present:
        """Says that this broker lives."""
        was_known, *found = await self._run(1)
        return Present(frozenset([b.decode() for b in found] + [self._broker_id]), bool(was_known))

    async def others(self) -> frozenset[str]:
        """The other brokers that live; says nothing of this one."""
        _, *found = await self._run(0)
        return frozenset([b.decode() for b in found]) - {self._broker_id}

    async def _run(self, lives: int) -> list[Any]:
        reply: list[Any] = await self._store.script(
            PRESENCE, [keys.BROKERS], [self._broker_id, self._ttl_ms, lives]
        )
        return reply

    async def leave(self) -> None:
        """Says goodbye: what this broker answered for can be taken over at once."""
        await self._store.command("ZREM", keys.BROKERS, self._broker_id)
