"""Requests of one model that wait for a worker, shared fairly between tenants and by rank within one. Pure.

Between tenants it is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing: A Scheduling
Algorithm for Integrated Services Packet Switching Networks", SIGCOMM 1996): a tenant's turn has a start tag,
the lowest is served first, and serving work l with weight w moves the tenant's next start tag to S + l/w. A
tenant that comes back starts at the virtual time, the start tag served last, or where it left, if that is
later: idle time is not saved up. While two tenants wait, the work that they are served per weight differs by
l1/w1 + l2/w2 at most, l being their largest requests (theorem 1 there). A tenant alone gets everything.

Only the tag of a tenant's turn counts, not which of its requests takes it. That is decided by `service_order`
when the turn comes, so priorities order the requests of a tenant and win it nothing from others.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from allspark_bus import keys, service_order

from allspark_broker.affinity import Prefix
from allspark_broker.lazy_heap import LazyHeap
from allspark_broker.work import Work

#: Bodies of the waiting requests of one model; those beyond it are read again from the ledger.
MAX_BODY_BYTES = 64 << 20
#: Tenants without waiting requests whose tags are kept; beyond it the one served longest ago starts anew.
MAX_REMEMBERED = 4096


@dataclass(slots=True)
class Waiting:
    """A queued request. `epoch` is the one in the ledger; a dispatch raises it.

    Without a `body` the ledger has it. `prefix` is what it is routed by, once it is known, and `work` what
    its tenant is charged (before it is pushed). `was_served`: it had its turn and came back from a worker.
    """

    request_id: str
    epoch: int
    priority: int
    created_ms: int
    deadline_ms: int = 0
    body: bytes = field(default=b"", repr=False)
    resume: bool = False
    was_served: bool = False
    prefix: Prefix | None = field(default=None, repr=False)
    work: Work | None = None

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return keys.split_request_id(self.request_id)[0]

    @property
    def rank(self) -> float:
        """Its place among the requests of its tenant, lowest first."""
        return service_order.rank(self.priority, self.created_ms / 1000)

    def is_late(self, now_ms: int) -> bool:
        """Whether its deadline has passed."""
        return 0 < self.deadline_ms <= now_ms


@dataclass(frozen=True, slots=True)
class Ahead:
    """How many are before a request, the tokens of their prompts and outputs, and how many more than those
    that is. `usual_s`: how long it took lately until as many had left.
    """

    requests: int
    prompt: float = 0.0
    output: float = 0.0
    unknown: int = 0
    usual_s: float = 0.0


@dataclass(slots=True)
class _Totals:
    """Of some requests that wait."""

    requests: int = 0
    prompt: int = 0
    output: int = 0

    def add(self, work: Work, sign: int) -> None:
        self.requests += sign
        self.prompt += sign * work.prompt
        self.output += sign * work.output

    def of(self, requests: int) -> tuple[float, float, int]:
        """Prompt and output tokens of so many of them on average; or that many unknown ones."""
        share = requests / self.requests if self.requests else 0.0
        return share * self.prompt, share * self.output, 0 if self.requests else requests


@dataclass(slots=True)
class _Backlog:
    """What a tenant has waiting: by rank, how many of each priority, and all together."""

    weight: float
    by_rank: LazyHeap = field(default_factory=LazyHeap)
    by_priority: Counter[int] = field(default_factory=Counter)
    totals: _Totals = field(default_factory=_Totals)


class RequestQueue:
    """Bounded; removal by id. What comes back from a worker passes the bound, and goes first: it is paid for.

    `weight_of(tenant)` > 0 is its share relative to others. The bound is shared like the work: once it is
    reached, a tenant is denied if it has its share of the places, and admitted if not. Nobody is dropped for
    that; those over their share are denied until they are below. So with k tenants at most
    bound x (1 + 1/2 + ... + 1/k) requests of equal weights wait. `max_body_bytes` bounds what the bodies take
    that are kept here.
    """

    def __init__(
        self,
        bound: int,
        weight_of: Callable[[str], float] = lambda _: 1.0,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.bound = bound
        self.body_bytes = 0
        self._weight_of = weight_of
        self._max_body_bytes = max_body_bytes
        self._promised: Counter[str] = Counter()
        self._num_promised = 0
        self._live: dict[str, Waiting] = {}
        self._returned = LazyHeap()
        self._returned_totals = _Totals()
        self._deadlines = LazyHeap()
        self._backlogs: dict[str, _Backlog] = {}
        self._turns = LazyHeap()  # tenants with a backlog, by start tag
        self._finish: OrderedDict[str, float] = OrderedDict()  # of others: the end of their last turn
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, rid: str) -> bool:
        return rid in self._live

    @property
    def is_unused(self) -> bool:
        """Nobody waits, and nobody was promised a place."""
        return not self._live and not self._num_promised

    def waiting_by_tenant(self) -> dict[str, int]:
        """How many requests each tenant has here, without those that came back from workers."""
        return {tenant: len(backlog.by_rank) for tenant, backlog in self._backlogs.items()}

    def promise(self, tenant: str) -> None:
        """A request is being recorded, and will be pushed: it has a place already."""
        self._promised[tenant] += 1
        self._num_promised += 1

    def withdraw(self, tenant: str) -> None:
        """The place of `promise` is given back."""
        self._promised[tenant] -= 1
        self._num_promised -= 1
        if not self._promised[tenant]:
            del self._promised[tenant]

    def has_room(self, tenant: str) -> bool:
        """Whether a new request of the tenant may be queued."""
        if len(self._live) + self._num_promised < self.bound:
            return True
        total = sum(backlog.weight for backlog in self._backlogs.values())
        total += sum(self._weight_of(t) for t in {tenant, *self._promised} if t not in self._backlogs)
        return (self._num_of(tenant) + 1) * total <= self.bound * self._weight_of(tenant)

    def _num_of(self, tenant: str) -> int:
        backlog = self._backlogs.get(tenant)
        return self._promised[tenant] + (0 if backlog is None else len(backlog.by_rank))

    def may_keep(self, num_bytes: int) -> bool:
        """Whether a body of that size may stay with its request."""
        return self.body_bytes + num_bytes <= self._max_body_bytes

    def ahead_of(self, tenant: str, priority: int) -> Ahead:
        """About what would be served before a new request: the tenant's own, and others in their turns.

        As if those of a tenant were equally large; what age does to priorities is left out.
        """
        backlog = self._backlogs.get(tenant)
        by_priority = {} if backlog is None else backlog.by_priority
        own = sum(count for other, count in by_priority.items() if other >= priority)
        own += self._promised[tenant]
        weight = self._weight_of(tenant) if backlog is None else backlog.weight
        parts = [
            (other, min(self._num_of(name), math.ceil((own + 1) * other.weight / weight)))
            for name, other in self._backlogs.items()
            if name != tenant
        ]
        counted = [
            (len(self._returned), self._returned_totals),
            (own, backlog.totals if backlog else _Totals()),
        ]
        counted += [(count, other.totals) for other, count in parts]
        prompts, outputs, unknown = zip(*[totals.of(count) for count, totals in counted], strict=True)
        return Ahead(sum(count for count, _ in counted), sum(prompts), sum(outputs), sum(unknown))

    def push(self, waiting: Waiting) -> None:
        """Adds a request, or replaces the entry of the same id."""
        rid = waiting.request_id
        self.remove(rid)
        self._live[rid] = waiting
        self.body_bytes += len(waiting.body)
        if waiting.deadline_ms > 0:
            self._deadlines.push(rid, waiting.deadline_ms)
        work = waiting.work or Work(0)
        if waiting.was_served:
            self._returned.push(rid, waiting.rank)
            self._returned_totals.add(work, 1)
            return
        tenant = waiting.tenant
        backlog = self._backlogs.get(tenant)
        if backlog is None:
            backlog = self._backlogs[tenant] = _Backlog(self._weight_of(tenant))
            self._turns.push(tenant, self._start(tenant))
            self._finish.pop(tenant, None)
        backlog.by_rank.push(rid, waiting.rank)
        backlog.by_priority[waiting.priority] += 1
        backlog.totals.add(work, 1)

    def _start(self, tenant: str) -> float:
        if tenant in self._turns:
            return self._turns.rank(tenant)
        return max(self._virtual, self._finish.get(tenant, 0.0))

    def peek(self) -> Waiting | None:
        """The next request, left in place."""
        rid = self._returned.first()
        if rid is None and (tenant := self._turns.first()) is not None:
            rid = self._backlogs[tenant].by_rank.first()
        return None if rid is None else self._live[rid]

    def serve(self, waiting: Waiting) -> None:
        """Takes a request out, for a worker, and charges its tenant, once."""
        tenant, start = waiting.tenant, self._start(waiting.tenant)
        self.remove(waiting.request_id)
        if not waiting.was_served:
            self._charge(tenant, start, waiting.work or Work(0))

    def charge(self, tenant: str, work: Work) -> None:
        """Counts what went to a worker without waiting."""
        self._charge(tenant, self._start(tenant), work)

    def _charge(self, tenant: str, start: float, work: Work) -> None:
        self._virtual = max(self._virtual, start)
        weight = self._weight_of(tenant)
        finish = start + work.tokens / weight
        if (backlog := self._backlogs.get(tenant)) is not None:
            backlog.weight = weight
            self._turns.push(tenant, finish)
        else:
            self._remember(tenant, finish)

    def _remember(self, tenant: str, finish: float) -> None:
        self._finish.pop(tenant, None)
        if finish > self._virtual:
            self._finish[tenant] = finish
        if len(self._finish) > MAX_REMEMBERED:
            self._finish.popitem(last=False)

    def remove(self, rid: str) -> bool:
        """Forgets a request; False if it is not here."""
        waiting = self._live.pop(rid, None)
        if waiting is None:
            return False
        self.body_bytes -= len(waiting.body)
        self._deadlines.remove(rid)
        if self._returned.remove(rid):
            self._returned_totals.add(waiting.work or Work(0), -1)
        else:
            self._leave(waiting)
        return True

    def _leave(self, waiting: Waiting) -> None:
        tenant = waiting.tenant
        backlog = self._backlogs[tenant]
        backlog.by_rank.remove(waiting.request_id)
        backlog.by_priority[waiting.priority] -= 1
        backlog.totals.add(waiting.work or Work(0), -1)
        if not backlog.by_rank:
            start = self._turns.rank(tenant)
            self._turns.remove(tenant)
            del self._backlogs[tenant]
            self._remember(tenant, start)

    def expired(self, now_ms: int) -> list[Waiting]:
        """Requests whose deadline has passed; they stay until removed."""
        return [self._live[rid] for rid in self._deadlines.up_to(now_ms)]

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        backlogs = self._backlogs.values()
        for heap in (self._returned, self._deadlines, self._turns, *[b.by_rank for b in backlogs]):
            heap.check()
        queued = [rid for heap in (self._returned, *[b.by_rank for b in backlogs]) for rid in heap]
        assert sorted(queued) == sorted(self._live), "a live request is not in exactly one heap"
        assert set(self._turns) == set(self._backlogs)
        assert not set(self._finish) & set(self._backlogs)
        for backlog in backlogs:
            assert backlog.by_rank, "an empty backlog has a turn"
            assert +backlog.by_priority == Counter(self._live[rid].priority for rid in backlog.by_rank)
        for totals, heap in (
            (self._returned_totals, self._returned),
            *[(b.totals, b.by_rank) for b in backlogs],
        ):
            works = [self._live[rid].work or Work(0) for rid in heap]
            assert totals == _Totals(len(works), sum(w.prompt for w in works), sum(w.output for w in works))
        assert self.body_bytes == sum(len(w.body) for w in self._live.values())
        assert self._num_promised == self._promised.total()
