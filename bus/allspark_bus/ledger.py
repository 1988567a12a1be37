"""The ledger: who owns a request, under which epoch, and what its stream holds (rules R2, R3, R7, R10).

Every change is one script on the request's own two keys. The two indexes (open requests of a model,
requests of a tenant) live under other keys: an entry is added before the ledger record exists and removed
after it ended, so an index can hold too much for a moment, never too little; readers check the ledger.
An entry belongs to one admission of a uuid and not to the next (`keys.index_entry`).
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from allspark_proto import records
from redis.exceptions import OutOfMemoryError

from allspark_bus import damage, keys, upkeep
from allspark_bus.errors import Damaged
from allspark_bus.losses import Losses
from allspark_bus.round_trip import Arg
from allspark_bus.scripts import ALLOW_OOM, ANYWAY, Script
from allspark_bus.store import Store
from allspark_bus.upkeep import is_of, outcomes, text_of

ADMIT = Script.load("admit")
ADVANCE = Script.load("advance", ALLOW_OOM)
APPEND = Script.load("append")
APPEND_END = Script.load("append", ALLOW_OOM)
FINISH = Script.load("finish", ALLOW_OOM)
RELEASE = Script.load("release", ALLOW_OOM)

APPENDED, CLOSED, STALE, GAP, DAMAGED, FULL = 0, 1, 2, 3, 4, 5

log = logging.getLogger(__name__)


def now_ms() -> int:
    """Wall clock in ms; only for records that people read and for deadlines, which come as wall clock."""
    return int(time.time() * 1000)


@dataclass(frozen=True, slots=True)
class Ttl:
    """How long results and tombstones are kept, in ms."""

    result_ms: int = 3_600_000
    tombstone_ms: int = 300_000


@dataclass(frozen=True, slots=True)
class Admission:
    """`outcome` is "new", "same" (an identical retry) "conflict" (another body under the same uuid)
    or "late" (a copy of a call from before the uuid was released). `generation` is that of the model's
    catalogue record, looked up after the request was indexed (0: there is none).
    """

    outcome: str
    epoch: int
    worker: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Advance:
    """`outcome` is "ok", "gone" (ended or released) or "stale" (somebody else raised the epoch)."""

    outcome: str
    epoch: int
    worker: str
    deaths: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ends: GENERATE_STATUS, reason (a short word) and message (for people)."""

    status: int
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """An open request as the ledger has it."""

    request_id: str
    model: str
    epoch: int
    worker: str
    body: bytes
    created_ms: int
    deadline_ms: int
    priority: int
    num_tokens: int
    deaths: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has an open request: its worker ("": it waits), and the broker that answers for it."""

    epoch: int
    worker: str
    broker: str


@dataclass(frozen=True, slots=True)
class Append:
    """One append of a step: `tokens` start at `position`; `ending` makes it the terminal record.

    `tensors`, serialised by name, go with it; only the terminal record may have some without tokens.
    """

    request_id: str
    model: str
    epoch: int
    position: int
    tokens: Sequence[int]
    ending: Ending | None = None
    tensors: dict[str, bytes] | None = None


class Ledger:
    """Typed access to the scripts."""

    def __init__(self, store: Store, ttl: Ttl | None = None, broker: str = "") -> None:
        """`ttl` is promised to the requests that are admitted here; who admits none needs none.

        `broker` answers for the requests that are admitted, dispatched or claimed here.
        """
        self._store = store
        self._ttl = ttl or Ttl()
        self._broker = broker
        self.losses = Losses(store)

    async def admit(self, entry: Entry, digest: bytes, sent_ms: int = 0) -> Admission:
        """Records a request and indexes it, or finds the one that is there already.

        `sent_ms` is when the call was first sent (0: not known). Raises OutOfMemoryError: nothing new can be
        recorded.
        """
        tenant, _ = keys.split_request_id(entry.request_id)
        rid, tag = entry.request_id, os.urandom(keys.TAG_CHARS // 2).hex()
        member = keys.index_entry(rid, tag)
        indexes = (keys.tenant_requests(tenant), keys.open_requests(entry.model))
        try:
            *_, reply, generation = await self._store.in_order(
                [
                    ANYWAY.command([indexes[0]], ["SADD", member]),
                    ANYWAY.command([indexes[1]], ["ZADD", entry.created_ms, member]),
                ],
                # Who stops the model writes its record before it counts what is open, so that one of the two
                # sees the other.
                [
                    self._admit_command(entry, digest, sent_ms, tag),
                    ("HGET", keys.model(entry.model), "gen"),
                ],
                kept=(Damaged,),
            )
            if isinstance(reply, Damaged):
                raise reply
            generation = b"" if isinstance(generation, Damaged) else generation
        except OutOfMemoryError as error:
            reply, generation = await self._recorded_before(rid, digest), b""
            full = error if reply is None else None
        else:
            full = None
        if reply is None or text_of(reply[3]) != tag:  # else this very call recorded it, after all
            await self._store.batch([("SREM", indexes[0], member), ("ZREM", indexes[1], member)])
        if full is not None:
            raise full
        with damage.named(f"request {rid}"):
            admission = Admission(text_of(reply[0]), int(reply[1]), text_of(reply[2]), int(generation or 0))
        if admission.outcome != "new":
            await self._store.replicated(keys.request(rid))  # by whoever wrote it
        return admission

    def _admit_command(self, e: Entry, digest: bytes, sent_ms: int, tag: str) -> tuple[Arg, ...]:
        args: list[Arg] = [
            digest,
            e.body,
            e.model,
            e.epoch,
            e.worker,
            e.created_ms,
            e.deadline_ms,
            e.priority,
        ]
        args += [self._ttl.result_ms, self._ttl.tombstone_ms, sent_ms, tag, self._broker]
        return ADMIT.command(_keys(e.request_id), args)

    async def _recorded_before(self, rid: str, digest: bytes) -> list[bytes] | None:
        """The answer to an admission that was refused, if it is a retry of one that was accepted."""
        state, recorded, epoch, worker, tag = await self._store.command(
            "HMGET", keys.request(rid), "st", "dg", "ep", "wk", "ix"
        )
        is_there = state in (b"open", b"ended") and recorded == digest
        return [b"same", epoch, worker, tag or b""] if is_there else None

    async def advance(self, rid: str, expected_epoch: int, worker: str, *, died: bool = False) -> Advance:
        """Dispatches (worker given) or claims (worker "") by raising the epoch.

        `died` counts a death, which may be taken back: see `losses`. Raises Damaged.
        """
        with damage.named(f"request {rid}"):
            reply = await self._store.script(
                ADVANCE, [keys.request(rid)], [expected_epoch, worker, 1 if died else 0, self._broker]
            )
            return Advance(text_of(reply[0]), int(reply[1]), text_of(reply[2]), int(reply[3]), int(reply[4]))

    async def append(self, appends: Sequence[Append]) -> list[tuple[int, int]]:
        """Appends one step of many requests: a (code, tokens in the stream) for each.

        One round trip, and another one if some of them end. What cannot be appended to because its record is
        damaged is condemned. At full memory ends are appended, since what has ended gives memory back; all
        else is FULL, and can be tried again.
        """
        commands = [self._append_command(a) for a in appends]
        replies = await self._store.outcomes(commands, (Damaged, OutOfMemoryError))
        for a, reply in zip(appends, replies, strict=True):
            if isinstance(reply, Damaged):
                await self.condemn(a.request_id, reply.reason)
        replies = [(_refusal(r), 0) if isinstance(r, Exception) else r for r in replies]
        # Not before the answers: a refused zombie must not hide a request that goes on elsewhere.
        ended = [
            ("ZREM", keys.open_requests(a.model), keys.index_entry(a.request_id, text_of(reply[2])))
            for a, reply in zip(appends, replies, strict=True)
            if a.ending is not None and int(reply[0]) in (APPENDED, CLOSED)
        ]
        await self._store.batch(ended)
        return [(int(code), int(n)) for code, n, *_ in replies]

    def _append_command(self, a: Append) -> tuple[Arg, ...]:
        end = a.ending
        record = records.Record(
            a.epoch,
            a.position,
            tuple(a.tokens),
            end.status if end else 0,
            end.reason if end else "",
            end.message if end else "",
            a.tensors or {},
        )
        args: list[Arg] = [a.epoch, a.position, len(a.tokens), records.encode(record)]
        if end is not None:
            args += [end.status, end.reason, end.message, now_ms(), 1 if a.tensors else 0]
        script = APPEND if end is None or a.tensors else APPEND_END
        return script.command(_keys(a.request_id), args)

    async def finish(self, rid: str, ending: Ending) -> tuple[str, str]:
        """Ends an open request and fences its worker off.

        Returns ("ended"|"already"|"released"|"unknown", worker that held it or "").
        """
        reply = await self._store.script(
            FINISH, _keys(rid), [ending.status, ending.reason, ending.message, now_ms()]
        )
        outcome, worker, model, tag = map(text_of, reply)
        if model:
            await self._store.command("ZREM", keys.open_requests(model), keys.index_entry(rid, tag))
        return outcome, worker

    async def condemn(self, rid: str, why: str) -> None:
        """Ends a request whose record is damaged, whatever is left of it."""
        log.error("request %s ends here: %s", rid, why)
        await self.finish(rid, Ending(records.INTERRUPTED, "damaged", why))

    async def release(self, rid: str) -> tuple[str, str, bool]:
        """Forgets a request: ("ok"|"released"|"unknown", worker that held it or "", was it open)."""
        reply = await self._store.script(RELEASE, _keys(rid), [now_ms()])
        outcome, worker, model, state, tag = map(text_of, reply)
        tenant, _ = keys.split_request_id(rid)
        if outcome != "unknown":  # "released": perhaps by somebody who died before these lines
            member = keys.index_entry(rid, tag)
            await self._store.batch(
                [
                    ("ZREM", keys.open_requests(model), member),
                    ("SREM", keys.tenant_requests(tenant), member),
                ]
            )
        return outcome, worker, state == "open"

    async def load(self, rid: str) -> Entry | None:
        """The record of an open request; None when it has ended or is unknown. Raises Damaged."""
        fields = ("st", "md", "ep", "wk", "body", "cr", "dl", "pr", "n", "dt")
        with damage.named(f"request {rid}"):
            h = await self._store.command("HMGET", keys.request(rid), *fields)
            return _entry(rid, h) if h[0] == b"open" else None

    async def is_same(self, rid: str, digest: bytes) -> bool:
        """Whether a request with this body is in the ledger already."""
        return bool(await self._store.command("HGET", keys.request(rid), "dg") == digest)

    async def model_of(self, rid: str) -> str | None:
        """The model of a request that has not been released."""
        model = await self._store.command("HGET", keys.request(rid), "md")
        return None if model is None else text_of(model)

    async def open_requests(self, model: str) -> list[str]:
        """Ids of the model's open requests, oldest first; may name some that just ended."""
        return list(dict.fromkeys([rid for rid, _ in await self.open_entries(model)]))

    async def open_entries(self, model: str) -> list[tuple[str, str]]:
        """(id, tag) of every entry in the index of the model's open requests, oldest first."""
        found = await self._store.command("ZRANGE", keys.open_requests(model), 0, -1)
        return [keys.split_index_entry(text_of(r)) for r in found]

    async def holders(self, entries: Sequence[tuple[str, str]]) -> list[Holder | Damaged | None]:
        """Who has each request of an index; None for an entry whose request has ended."""
        fields = ("st", "ix", "ep", "wk", "br")
        found = await outcomes(self._store, [("HMGET", keys.request(rid), *fields) for rid, _ in entries])
        return [_holder(rid, tag, record) for (rid, tag), record in zip(entries, found, strict=True)]

    async def indexed_models(self) -> frozenset[str]:
        """Models with an index of open requests; some may be gone, and an entry was left behind."""
        prefix = keys.open_requests("")
        return frozenset([key.removeprefix(prefix) async for key in self._store.scan(prefix + "*")])

    async def num_open(self, model: str) -> int:
        """How many requests of the model are open."""
        return int(await self._store.command("ZCARD", keys.open_requests(model)))

    async def drop_from_index(self, model: str, entries: Sequence[tuple[str, str]]) -> None:
        """Removes entries of the index of the model's open requests."""
        if entries:
            members = [keys.index_entry(rid, tag) for rid, tag in entries]
            await self._store.command("ZREM", keys.open_requests(model), *members)

    async def tenant_requests(self, tenant: str) -> list[str]:
        """Ids of the tenant's requests that have not been released; may name some that expired."""
        found = await self._store.command("SMEMBERS", keys.tenant_requests(tenant))
        return list({keys.split_index_entry(text_of(r))[0] for r in found})

    async def num_unreleased(self, model: str, tenant: str) -> int:
        """How many of a tenant's requests of a model are still in the ledger."""
        rids = await self.tenant_requests(tenant)
        owners = await outcomes(self._store, [("HGET", keys.request(r), "md") for r in rids])
        return owners.count(model.encode())

    async def sweep_tenants(self) -> int:
        """Drops index entries whose ledger record expired; returns how many. See `upkeep`."""
        return await upkeep.sweep(self._store)

    async def tokens(self, rid: str) -> list[int]:
        """Every token in the stream; a worker reads them before it continues a request. Raises Damaged."""
        with damage.named(f"the stream of request {rid}"):
            for _ in range(2):  # an append or a fail-over may come between the two commands
                length, entries = await self._store.batch(
                    [("HGET", keys.request(rid), "n"), ("XRANGE", keys.stream(rid), "-", "+")]
                )
                tokens = records.tokens_of([records.decode(fields[1]) for _, fields in entries])
                if len(tokens) == int(length or 0):
                    return tokens
            raise ValueError(f"it holds {len(tokens)} of {int(length or 0)} tokens")


def _entry(rid: str, h: Sequence[bytes]) -> Entry:
    body, numbers = h[4], [int(value) for value in (h[2], *h[5:])]
    if not isinstance(body, bytes):
        raise ValueError("it has no body")
    epoch, created_ms, deadline_ms, priority, num_tokens, deaths = numbers
    return Entry(
        rid, h[1].decode(), epoch, h[3].decode(), body, created_ms, deadline_ms, priority, num_tokens, deaths
    )


def _holder(rid: str, tag: str, record: Sequence[bytes] | Damaged) -> Holder | Damaged | None:
    if isinstance(record, Damaged):
        return record
    state, found, epoch, worker, broker = record
    if state != b"open" or not is_of(found, tag):
        return None
    try:
        with damage.named(f"request {rid}"):
            return Holder(int(epoch), worker.decode(), text_of(broker or b""))
    except Damaged as error:
        return error


def _refusal(error: Exception) -> int:
    return DAMAGED if isinstance(error, Damaged) else FULL


def _keys(rid: str) -> list[str]:
    return [keys.request(rid), keys.stream(rid)]
