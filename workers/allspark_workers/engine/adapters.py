"""The adapters of one model: which are in memory, who uses them, what is loaded and thrown out next.

A request leases its adapter from the moment the engine takes it until it ends, running or not, so an adapter
is never dropped while somebody counts on it. Loading happens on a thread of its own; whoever waits for it is
passed over by the scheduler. A slot that nobody leases keeps its adapter until another one needs the place
(least recently used first).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from allspark_kernels import NO_ADAPTER, LoraTable, LoraWeights

from allspark_workers.engine.device import use_device
from allspark_workers.engine.errors import AdapterLimitError, EngineError
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.types import AdapterLease, ModelConfig
from allspark_workers.models.loader import Model
from allspark_workers.models.lora_files import AdapterReader, AdapterWeights, find_adapter
from allspark_workers.models.lora_sites import AdapterSite, adapter_sites

logger = logging.getLogger(__name__)

#: How long requests for adapters that are in memory may overtake one that waits for a place. Without a limit,
#: steady traffic for some adapters would keep every other one out for ever.
PATIENCE_S = 1.0


class AdapterGroup(Protocol):
    """The other ranks: each reads its own part of an adapter when told to, and keeps the same slots."""

    def prepare_adapter(self, name: str) -> None:
        """They begin to read."""

    def drop_adapter(self, name: str) -> None:
        """What they read is not needed."""

    def install_adapter(self, name: str, slot: int, digest: str) -> None:
        """What they read goes into a slot before the next step."""

    def clear_adapter(self, slot: int) -> None:
        """The slot is empty from the next step on."""


@dataclass(slots=True, eq=False)
class _Resident:
    """An adapter in a slot, or on its way there (`loading`). `last_use`: number of its last release."""

    name: str
    slot: int
    loading: Future[AdapterWeights] | None
    digest: str = ""
    nbytes: int = 0
    last_use: int = 0
    leases: set[AdapterLease] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Tenancy:
    """The sequences that hold a lease, and since when it waits for a slot."""

    sequences: set[Sequence]
    since_s: float


class AdapterPool:
    """`wake()` is called from the loading thread when the engine thread has something to take over.

    `lease` and `check_files` may be called from any thread, `preload` before the engine steps; all else
    belongs to the engine thread.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        wake: Callable[[], None],
        clock: Callable[[], float],
        group: AdapterGroup | None = None,
    ) -> None:
        """`group`: the other ranks of a model on several devices; `model` is this rank's part."""
        self._group = group
        self._device, self._dtype = model.device, model.dtype
        self._roots = [Path(root) for root in config.lora_roots]
        self._max_num, self._max_rank = config.lora_max_num, config.lora_max_rank
        self._wake = wake
        self._clock = clock
        self._sites = [site for site, _ in adapter_sites(model.decoder, model.whole, model.shard)]
        self.table: LoraTable | None = None
        if self._max_num:
            shapes = [(site.in_features, site.widths) for site in self._sites]
            self.table = LoraTable(shapes, self._max_num, model.dtype, model.device)
        self._resident: dict[str, _Resident] = {}
        self._waiting: dict[AdapterLease, None] = {}  # in the order of arrival
        self._tenancies: dict[AdapterLease, _Tenancy] = {}
        self._failed: list[tuple[Sequence, EngineError]] = []
        self._uses = itertools.count(1)
        self._num_loading = 0
        self._is_settled = True
        self._executor: ThreadPoolExecutor | None = None

    # ---- before a request enters --------------------------------------------------------------------

    def lease(self, name: str) -> AdapterLease:
        """A lease for one request, not in force yet. Raises ValueError where no adapters are allowed."""
        if self.table is None:
            raise ValueError(self._none_allowed(name))
        return AdapterLease(name)

    def check_files(self, name: str) -> None:
        """Raise what loading the adapter would raise, as far as configuration and headers tell.

        AdapterNotFoundError, ModelIOError, UnsupportedModelError, AdapterLimitError.
        """
        self._reader(name)

    def preload(self, names: Iterable[str]) -> None:
        """Load adapters now, in this thread. Raises as `check_files`, or ModelMemoryError."""
        wanted = list(dict.fromkeys(names))
        if len(wanted) > self._max_num:
            raise AdapterLimitError(
                f"{len(wanted)} adapters are to be loaded, the limit is {self._max_num} "
                "(--lora-max-num of the workers)"
            )
        for slot, name in enumerate(wanted):
            if self._group is not None:
                self._group.prepare_adapter(name)
            weights = self._load(name)
            self._resident[name] = entry = _Resident(name, slot, None)
            self._install(entry, weights)

    def _reader(self, name: str) -> AdapterReader:
        if self.table is None:
            raise AdapterLimitError(self._none_allowed(name))
        return AdapterReader(find_adapter(name, self._roots), self._sites, self._max_rank)

    def _none_allowed(self, name: str) -> str:
        return f"adapter {name!r}: this worker allows none (--lora-max-num is 0)"

    def _load(self, name: str) -> AdapterWeights:
        started_s = time.monotonic()
        with use_device(self._device):
            weights = self._reader(name).load(self._dtype, self._device)
        logger.info(
            "adapter %r: %d bytes loaded in %.2f s", name, weights.nbytes, time.monotonic() - started_s
        )
        return weights

    # ---- the life of a lease ------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """A sequence with a lease enters the engine; several sequences of a request share one."""
        lease = sequence.request.adapter
        if lease is None:
            return
        tenancy = self._tenancies.get(lease)
        if tenancy is not None:
            tenancy.sequences.add(sequence)
            return
        self._tenancies[lease] = _Tenancy({sequence}, self._clock())
        self._waiting[lease] = None
        self._is_settled = False

    def end(self, sequence: Sequence) -> None:
        """A sequence is over, whatever the reason; harmless for one that holds nothing."""
        lease = sequence.request.adapter
        tenancy = self._tenancies.get(lease) if lease is not None else None
        if lease is None or tenancy is None:
            return
        tenancy.sequences.discard(sequence)
        if tenancy.sequences:
            return
        del self._tenancies[lease]
        self._waiting.pop(lease, None)
        entry = self._resident.get(lease.name)
        if entry is not None and lease in entry.leases:
            entry.leases.remove(lease)
            entry.last_use = next(self._uses)
        lease.retract()
        self._is_settled = False

    def forget_requests(self) -> None:
        """All requests are gone; adapters stay."""
        for lease in self._tenancies:
            lease.retract()
        self._tenancies.clear()
        self._waiting.clear()
        self._failed.clear()
        for entry in self._resident.values():
            entry.leases.clear()

    def drop(self) -> None:
        """Give the memory of all adapters back; only while no request is there."""
        if self._tenancies:
            raise RuntimeError("adapters are dropped while requests hold them")
        for entry in self._resident.values():
            if self.table is not None:
                self.table.clear(entry.slot)
        self._resident.clear()  # what is being loaded at this moment is not waited for
        self._num_loading = 0

    def advance(self) -> list[tuple[Sequence, EngineError]]:
        """Take over what was loaded, give out leases; the sequences whose adapter cannot be had, and why."""
        if self._is_settled and not self._num_loading:
            return []
        for entry in [e for e in self._resident.values() if e.loading is not None and e.loading.done()]:
            self._take_over(entry)
        self._grant_waiting()
        self._is_settled = True
        failed, self._failed = self._failed, []
        return failed

    def _take_over(self, entry: _Resident) -> None:
        loading, entry.loading = entry.loading, None
        assert loading is not None
        self._num_loading -= 1
        try:
            self._install(entry, loading.result())
        except Exception as error:  # noqa: BLE001 - request border: whoever leases this adapter fails with it
            logger.warning("adapter %r cannot be loaded: %s", entry.name, error)
            reason = error if isinstance(error, EngineError) else EngineError(f"{error!r}")
            for lease in entry.leases:
                self._failed += [(sequence, reason) for sequence in self._tenancies[lease].sequences]
            del self._resident[entry.name]
            if self._group is not None:
                self._group.drop_adapter(entry.name)
            return
        for lease in entry.leases:
            lease.enter_into_force(entry.slot, entry.digest)

    def _install(self, entry: _Resident, weights: AdapterWeights) -> None:
        assert self.table is not None
        self.table.put(entry.slot, weights.sites)
        if self._group is not None:
            self._group.install_adapter(entry.name, entry.slot, weights.digest)
        entry.digest, entry.nbytes = weights.digest, weights.nbytes

    def _grant_waiting(self) -> None:
        """In the order of arrival; the first that has waited PATIENCE_S for a slot stops those behind it."""
        now_s = self._clock()
        for lease in tuple(self._waiting):
            entry = self._resident.get(lease.name) or self._make_place(lease.name)
            if entry is not None:
                del self._waiting[lease]
                entry.leases.add(lease)
                if entry.loading is None:
                    lease.enter_into_force(entry.slot, entry.digest)
            elif now_s - self._tenancies[lease].since_s >= PATIENCE_S:
                return

    def _make_place(self, name: str) -> _Resident | None:
        """Start loading an adapter into a free slot, or one whose adapter nobody leases; None without one."""
        slots = set(range(self._max_num)) - {entry.slot for entry in self._resident.values()}
        if not slots:
            idle = [e for e in self._resident.values() if not e.leases and e.loading is None]
            if not idle:
                return None
            victim = min(idle, key=lambda entry: entry.last_use)
            logger.info("adapter %r makes room for %r", victim.name, name)
            del self._resident[victim.name]
            slots = {victim.slot}
        slot = min(slots)
        if self.table is not None:
            self.table.clear(slot)
        if self._group is not None:
            self._group.clear_adapter(slot)
            self._group.prepare_adapter(name)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        loading = self._executor.submit(self._load, name)
        self._num_loading += 1
        entry = self._resident[name] = _Resident(name, slot, loading)
        loading.add_done_callback(lambda _: self._wake())
        return entry

    # ---- what others ask ----------------------------------------------------------------------------

    def loaded(self) -> list[str]:
        """Names of the adapters in memory, in the order of their slots."""
        entries = sorted(self._resident.values(), key=lambda entry: entry.slot)
        return [entry.name for entry in entries if entry.loading is None]

    def num_leases(self, name: str) -> int:
        """Requests that count on an adapter."""
        entry = self._resident.get(name)
        return 0 if entry is None else len(entry.leases)

    @property
    def nbytes(self) -> int:
        """Bytes of the adapters in memory."""
        return sum(entry.nbytes for entry in tuple(self._resident.values()))

    def check(self, live: Iterable[Sequence]) -> None:
        """Raise unless exactly the live sequences hold leases, and every lease is in force or waits."""
        with_lease = {seq for seq in live if seq.request.adapter is not None}
        holders = {seq for tenancy in self._tenancies.values() for seq in tenancy.sequences}
        if not holders <= with_lease:
            raise ValueError(f"{len(holders - with_lease)} ended sequences still lease an adapter")
        granted = {lease for entry in self._resident.values() for lease in entry.leases}
        if granted | set(self._waiting) != set(self._tenancies):
            raise ValueError("a lease is neither granted nor waiting")
        for entry in self._resident.values():
            if any(lease.slot != (NO_ADAPTER if entry.loading else entry.slot) for lease in entry.leases):
                raise ValueError(f"a lease of adapter {entry.name!r} has the wrong slot")

    @contextmanager
    def warm_up(self) -> Iterator[AdapterLease | None]:
        """A lease on some adapter, if need be one of zeros, so that a warm-up compiles the kernels.

        None where no adapters are allowed. Only while nothing runs or loads.
        """
        if self.table is None:
            yield None
            return
        resident = next(iter(self._resident.values()), None)
        lease = AdapterLease("warm-up")
        lease.enter_into_force(resident.slot if resident is not None else 0, "")
        if resident is None:
            self.table.put(0, [_zeros(site, self._dtype, self._device) for site in self._sites])
        yield lease
        if resident is None:
            self.table.clear(0)


def _zeros(site: AdapterSite, dtype: torch.dtype, device: torch.device) -> LoraWeights:
    down = torch.zeros((len(site.widths), site.in_features), dtype=dtype, device=device)
    return LoraWeights(down, tuple(torch.zeros((1, w), dtype=dtype, device=device) for w in site.widths))
