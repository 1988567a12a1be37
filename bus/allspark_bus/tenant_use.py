"""What the open requests of a tenant with limits take: counted in Redis, so that all brokers see the same.

One hash for a tenant has an entry for every request that counts, and their sums; each change is one script.
An entry is made before the request is recorded, and removed when the ledger says that it has ended, by who
notices it. What was missed is made good from the ledger (`allspark_broker.limits`). Tenants without limits
have no hash.
"""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from allspark_bus import damage, keys
from allspark_bus.scripts import ALLOW_OOM, Script
from allspark_bus.store import Store

# A retry of what was recorded must get its answer at full memory too; anything new is refused right after.
RESERVE = Script.load("reserve", ALLOW_OOM)
FREE = Script.load("free", ALLOW_OOM)
_SUMS = (b"requests", b"tokens")


@dataclass(frozen=True, slots=True)
class Quota:
    """0: no limit. `token_burst` is the size of the bucket that fills with `token_rate` tokens per second."""

    max_requests: int = 0
    max_tokens: int = 0
    token_rate: float = 0.0
    token_burst: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`refused_by`: "requests", "tokens" or "rate"; "" if the request counts from now on, under `tag`.

    `requests` and `tokens` are the sums now; `wait_ms`: until the rate allows it.
    """

    refused_by: str
    tag: str
    requests: int
    tokens: int
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """A request that counts: under which tag, its tokens, and since when by the clock of Redis."""

    request_id: str
    tag: str
    tokens: int
    since_ms: int


class TenantUse:
    """Typed access to the scripts."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def reserve(self, rid: str, tokens: int, quota: Quota, returnable: int = 0) -> Verdict:
        """Counts a request of `tokens` if its tenant's limits allow it.

        `returnable` of them, less what it generated, come back to its rate when it does not count any more.
        """
        tag = os.urandom(6).hex()
        args = [quota.max_requests, quota.max_tokens, quota.token_rate, quota.token_burst, returnable]
        with damage.named(f"the use of tenant {keys.split_request_id(rid)[0]}"):
            outcome, *numbers = await self._store.script(RESERVE, _keys(rid), [rid, tag, tokens, *args])
            refused_by = "" if outcome == b"ok" else outcome.decode()
            requests, total, wait_ms = map(int, numbers)
            return Verdict(refused_by, tag, requests, total, wait_ms if refused_by else 0)

    async def free(self, rid: str, tag: str, generated: int | None = None) -> bool:
        """The request does not count any more, unless it is counted under another tag by now.

        `generated`: its tokens; None: not known, and nothing comes back to the rate.
        """
        args = [rid, tag, "" if generated is None else generated]
        return bool(await self._store.script(FREE, _keys(rid), args))

    async def withdraw(self, rid: str, tag: str) -> bool:
        """As `free`, for what was never recorded: all that it was charged comes back."""
        return bool(await self._store.script(FREE, _keys(rid), [rid, tag, "none"]))

    async def of(self, rid: str) -> Use | None:
        """How a request is counted."""
        value = await self._store.command("HGET", _keys(rid)[0], rid)
        return None if value is None else _use(rid, value)

    async def tenants(self) -> AsyncIterator[str]:
        """Tenants with requests that count; one may come twice."""
        before, after = keys.tenant_use("*").split("*")
        async for key in self._store.scan(keys.tenant_use("*")):
            yield key.removeprefix(before).removesuffix(after)

    async def forget(self, tenant: str) -> None:
        """Nothing of the tenant counts any more."""
        await self._store.command("DEL", keys.tenant_use(tenant))

    async def sums(self, tenant: str) -> tuple[int, int]:
        """Open requests that count, and their tokens."""
        found = await self._store.command("HMGET", keys.tenant_use(tenant), *_SUMS)
        with damage.named(f"the use of tenant {tenant}"):
            requests, tokens = (int(value or 0) for value in found)
        return requests, tokens

    async def all_of(self, tenant: str) -> list[Use]:
        """Every request that counts."""
        found = await self._store.command("HGETALL", keys.tenant_use(tenant))
        pairs = zip(found[::2], found[1::2], strict=True)
        return [_use(rid.decode(), value) for rid, value in pairs if rid not in _SUMS]


def _keys(rid: str) -> list[str]:
    tenant, _ = keys.split_request_id(rid)
    return [keys.tenant_use(tenant), keys.tenant_rate(tenant)]


def _use(rid: str, value: bytes) -> Use:
    with damage.named(f"the use of request {rid}"):
        tag, tokens, since_ms, *_ = value.decode().split()
        return Use(rid, tag, int(tokens), int(since_ms))
