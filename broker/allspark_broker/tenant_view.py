"""What the broker can say about tenants: what they have open, and their limits."""

import asyncio
from collections import Counter
from collections.abc import Mapping

from allspark_bus import keys
from allspark_bus.tenant_use import Quota
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.limits import Limits
from allspark_broker.queue import RequestQueue
from allspark_broker.workers import WorkerTable

MAX_TENANTS = 1000


async def tenant_status(
    queues: Mapping[str, RequestQueue], table: WorkerTable, limits: Limits, only: str = ""
) -> list[fleet.TenantStatus]:
    """A row for each tenant that is named in the tenants file or has something open here; of `only` one.

    Those with the most open requests come first, and no more than `MAX_TENANTS`.
    """
    queued: Counter[str] = Counter()
    for queue in queues.values():
        queued.update(queue.waiting_by_tenant())
    held = Counter(keys.split_request_id(rid)[0] for worker in table for rid in worker.flights)
    names = [only] if only else {*queued, *held, *limits.tenants.named()}
    chosen = sorted(names, key=lambda name: (-queued[name] - held[name], name))[:MAX_TENANTS]
    uses = await asyncio.gather(*[limits.sums(name) for name in chosen])
    return [_row(name, queued[name], held[name], limits, use) for name, use in zip(chosen, uses, strict=True)]


def _row(name: str, queued: int, held: int, limits: Limits, use: tuple[int, int]) -> fleet.TenantStatus:
    quota = limits.tenants.quota(name) or Quota()
    return fleet.TenantStatus(
        name=name,
        queued_requests=queued,
        inflight_requests=held,
        weight=limits.tenants.weight(name),
        open_requests=use[0],
        open_tokens=use[1],
        max_requests=quota.max_requests,
        max_tokens=quota.max_tokens,
        token_rate=quota.token_rate,
    )
