"""Limits of tenants: checked at admission, counted in Redis, and put right by what the ledger says.

A request counts from just before it is recorded until the ledger says that it has ended; who ends it, or
hears of it from its worker, looks and takes it out. That may be missed: a broker dies between two steps, a
tenant gets limits while requests of it run. So a tenant at its limit is looked through before it is denied,
and all are now and then. Tenants without limits cost nothing here, no round trip either.
"""

import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from allspark_bus import damage, keys
from allspark_bus.errors import Damaged, Denied
from allspark_bus.ledger import Ending, Ledger, Ttl, now_ms
from allspark_bus.store import Store
from allspark_bus.tenant_use import Quota, TenantUse, Use, Verdict
from allspark_bus.upkeep import outcomes
from allspark_proto import allspark_service_pb2 as pb

from allspark_broker.tenants import Tenants
from allspark_broker.work import Work

log = logging.getLogger(__name__)

LOOK_S = 0.5  # a tenant at its limit is looked through this often at most
RETRY_MS = 1000  # nobody knows when one of its requests ends
JITTER = 0.25  # hints are longer by up to so much, so that denied clients do not come back together
#: An entry without a record may belong to an admission in progress; after this it does not.
GRACE_MS = 30_000


@dataclass(frozen=True, slots=True)
class RequestState:
    """`name`: "open", "ended" or "released"; "" for unknown and damaged records. `generated`: tokens."""

    name: str = ""
    generated: int | None = None

    @classmethod
    def of(cls, state: bytes | None, tokens: bytes | None, tokens_before: bytes | None) -> "RequestState":
        """From fields of the record."""
        name = (state or b"").decode(errors="replace")
        count = (tokens_before if name == "released" else tokens) or b""
        return cls(name, int(count) if count.isdigit() else None)


class LimitedLedger(Ledger):
    """A ledger that takes what it ends out of the limits."""

    def __init__(self, store: Store, ttl: Ttl, broker: str, tenants: Tenants) -> None:
        super().__init__(store, ttl, broker)
        self.use = TenantUse(store)
        self.tenants = tenants

    def is_limited(self, rid: str) -> bool:
        """Whether the request's tenant has limits."""
        return self.tenants.quota(keys.split_request_id(rid)[0]) is not None

    async def finish(self, rid: str, ending: Ending) -> tuple[str, str]:
        """As Ledger."""
        answer = await super().finish(rid, ending)
        await self.settle(rid)
        return answer

    async def release(self, rid: str) -> tuple[str, str, bool]:
        """As Ledger. Whom the uuid belongs to afterwards is not known, so the entry is looked up before."""
        use = await self.use.of(rid) if self.is_limited(rid) else None
        answer = await super().release(rid)
        if use is not None:
            [state] = await self.states([rid])
            await self.use.free(rid, use.tag, state.generated if state.name == "released" else None)
        return answer

    async def states(self, rids: Sequence[str]) -> list[RequestState]:
        """Where the requests are."""
        fields = ("st", "n", "nt")
        found = await outcomes(self._store, [("HMGET", keys.request(rid), *fields) for rid in rids])
        return [RequestState() if isinstance(f, Damaged) else RequestState.of(*f) for f in found]

    async def tenants_with_requests(self) -> AsyncIterator[str]:
        """Tenants that have requests which are not released; one may come twice."""
        async for key in self._store.scan(keys.tenant_requests("*")):
            yield key.removeprefix(keys.tenant_requests(""))

    async def settle(self, rid: str) -> None:
        """Takes a request out of its tenant's limits if it has ended."""
        if self.is_limited(rid) and (use := await self.use.of(rid)) is not None:
            await self.settle_all([use])

    async def settle_all(self, uses: Iterable[Use]) -> int:
        """Takes out those that have ended; returns how many."""
        uses = list(uses)
        states = await self.states([use.request_id for use in uses])
        limit_ms = now_ms() - GRACE_MS
        gone = [
            (use, state.generated)
            for use, state in zip(uses, states, strict=True)
            if state.name == "ended" or (state.name != "open" and use.since_ms < limit_ms)
        ]
        for use, generated in gone:
            await self.use.free(use.request_id, use.tag, generated)
        return len(gone)


class Limits:
    """Of the tenants that have some. `work_of` is that of a request."""

    def __init__(
        self,
        ledger: LimitedLedger,
        work_of: Callable[[pb.StartRequestRequest], Work],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._work_of = work_of
        self._clock = clock
        self._looked_s: dict[str, float] = {}
        self._restored_for: object = None

    @property
    def tenants(self) -> Tenants:
        """Who has which."""
        return self._ledger.tenants

    async def sums(self, tenant: str) -> tuple[int, int]:
        """Open requests of a tenant in the whole fleet, and their tokens; zeros without limits."""
        return (0, 0) if self.tenants.quota(tenant) is None else await self._ledger.use.sums(tenant)

    async def take(self, rid: str, work: Work) -> str:
        """Counts a request that is about to be recorded; a tag, "" without limits. Raises Denied."""
        tenant, _ = keys.split_request_id(rid)
        quota = self._ledger.tenants.quota(tenant)
        if quota is None:
            return ""
        verdict = await self._ledger.use.reserve(rid, work.tokens, quota, work.returnable)
        if verdict.refused_by and self._may_look(tenant):
            await self.settle(tenant)
            verdict = await self._ledger.use.reserve(rid, work.tokens, quota, work.returnable)
        if verdict.refused_by:
            raise denial(tenant, work.tokens, quota, verdict)
        return verdict.tag

    async def give_back(self, rid: str, tag: str) -> None:
        """A request that counts as `tag` was not recorded: it goes, unless one of its id is open."""
        if tag and (await self._ledger.states([rid]))[0].name != "open":
            await self._ledger.use.withdraw(rid, tag)

    def _may_look(self, tenant: str) -> bool:
        now_s = self._clock()
        if now_s - self._looked_s.get(tenant, float("-inf")) < LOOK_S:
            return False
        self._looked_s = {t: s for t, s in self._looked_s.items() if now_s - s < LOOK_S}
        self._looked_s[tenant] = now_s
        return True

    async def settle(self, tenant: str) -> None:
        """Takes out what has ended."""
        if ended := await self._ledger.settle_all(await self._ledger.use.all_of(tenant)):
            log.info("tenant %s: %d ended request(s) do not count any more", tenant, ended)

    async def restore(self, tenant: str) -> None:
        """Counts the open requests that were not."""
        counted = {use.request_id for use in await self._ledger.use.all_of(tenant)}
        missing = [r for r in await self._ledger.tenant_requests(tenant) if r not in counted]
        states = await self._ledger.states(missing)
        for rid in [r for r, state in zip(missing, states, strict=True) if state.name == "open"]:
            await self._count(rid)

    async def _count(self, rid: str) -> None:
        try:
            entry = await self._ledger.load(rid)
            if entry is None:
                return
            with damage.named(f"request {rid}"):
                request = pb.StartRequestRequest.FromString(entry.body)
        except Damaged as e:
            log.warning("%s; it does not count for its tenant's limits", e.reason)
            return
        await self._ledger.use.reserve(rid, self._work_of(request).tokens, Quota())

    async def keep_up(self) -> None:
        """A duty: when the limits are new, what was there before them counts too."""
        file = self._ledger.tenants.file()
        if file is not self._restored_for:
            await self.restore_all()
            self._restored_for = file

    async def restore_all(self) -> None:
        """A duty: for every tenant, takes out what has ended and counts what was not."""
        for tenant in [t async for t in self._ledger.use.tenants()]:
            if self._ledger.tenants.quota(tenant) is None:
                await self._ledger.use.forget(tenant)  # it had limits
            else:
                await self.settle(tenant)
        if self._ledger.tenants.has_limits():
            for tenant in [t async for t in self._ledger.tenants_with_requests()]:
                if self._ledger.tenants.quota(tenant) is not None:
                    await self.restore(tenant)


def denial(tenant: str, work: int, quota: Quota, verdict: Verdict) -> Denied:
    """What a tenant over a limit is told."""
    if quota.max_tokens and work > quota.max_tokens:
        return Denied(
            f"tenant {tenant!r} may not have more than max_tokens {quota.max_tokens} open, and this request "
            f"alone has {work}, prompt and output: ask for less"
        )
    if verdict.refused_by == "requests":
        reason = f"{verdict.requests} requests are open, and max_requests is {quota.max_requests}"
    elif verdict.refused_by == "tokens":
        reason = (
            f"its {verdict.requests} open requests have {verdict.tokens} tokens of prompt and output; with "
            f"the {work} of this one that is over max_tokens, {quota.max_tokens}"
        )
    else:
        reason = f"{work} more tokens are over its token_rate, {quota.token_rate:g} per second"
    hint_ms = verdict.wait_ms if verdict.refused_by == "rate" else RETRY_MS
    hint_ms = math.ceil(hint_ms * random.uniform(1, 1 + JITTER))
    return Denied(f"tenant {tenant!r} is at a limit: {reason}", retry_after_ms=max(1, hint_ms))
