"""Workers that were lost with the requests they held, and the proof that one of them lives (R11).

A broker that claims a request from a worker it takes for dead counts a death, but a cut network looks just
the same. So the count is provisional: a worker that finds a request of its own claimed says so in Redis, with
the epoch under which it held the request. It can only do that after the claim, so the request did not kill
it, and the death is taken back. Workers need no broker for this, and brokers need to remember nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allspark_bus import damage, keys
from allspark_bus.errors import Damaged
from allspark_bus.scripts import ALLOW_OOM, Script
from allspark_bus.store import Store
from allspark_bus.upkeep import outcomes, text_of

SURVIVED = Script.load("survived", ALLOW_OOM)

#: A death is taken back so often in a row without a token in between; then a request that makes its workers
#: fall silent is treated like one that kills them, although they come back.
MAX_TAKEN_BACK = 3


@dataclass(frozen=True, slots=True)
class Suspect:
    """An open request: its epoch, how many deaths count, its deadline (0: none).

    `lost`: of each death the epoch that was claimed, and the worker, with _ for blanks in its name.
    """

    epoch: int
    deaths: int
    lost: tuple[tuple[int, str], ...]
    deadline_ms: int


class Losses:
    """What the ledger knows of them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def survived(self, held: Sequence[tuple[str, int]]) -> list[bool]:
        """Of each (request id, epoch) that a worker holds: whether it is still its own; one round trip.

        Deaths that were counted for those that are not are taken back. A broker may call it for a worker that
        it hears.
        """
        calls = [SURVIVED.command([keys.request(rid)], [epoch, MAX_TAKEN_BACK]) for rid, epoch in held]
        # Of a damaged record the next append tells what becomes of it.
        return [isinstance(answer, Damaged) or answer == 1 for answer in await outcomes(self._store, calls)]

    async def suspects(self, rids: Sequence[str]) -> list[Suspect | Damaged | None]:
        """How many deaths count now; None for a request that has ended."""
        fields = ("st", "ep", "dt", "de", "dl")
        found = await outcomes(self._store, [("HMGET", keys.request(rid), *fields) for rid in rids])
        return [_suspect(rid, record) for rid, record in zip(rids, found, strict=True)]

    async def answering(self, rids: Sequence[str]) -> list[str]:
        """The broker that answers for each request; "" for one that is not there."""
        found = await outcomes(self._store, [("HGET", keys.request(rid), "br") for rid in rids])
        return ["" if broker is None or isinstance(broker, Damaged) else text_of(broker) for broker in found]


def _suspect(rid: str, record: Sequence[bytes] | Damaged) -> Suspect | Damaged | None:
    if isinstance(record, Damaged):
        return record
    state, epoch, deaths, of, deadline_ms = record
    if state != b"open":
        return None
    lost = [death.partition("=") for death in text_of(of or b"").split()]
    try:
        with damage.named(f"request {rid}"):
            known = tuple((int(claimed), worker) for claimed, _, worker in lost)
            return Suspect(int(epoch), int(deaths), known, int(deadline_ms))
    except Damaged as error:
        return error
