"""One chaos run: a fleet of real processes, load, the faults of a seed, and the final accounts."""

import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allspark.client import AsyncClient, StatusError
from allspark.launcher import FleetOptions, ManagedProcess
from allspark_bus import keys
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb

from tests.chaos.load import Load, Story
from tests.chaos.network import CutFleet
from tests.chaos.real import RealWorkload
from tests.chaos.recovery import LIMIT_S, Period, Sample, samples
from tests.chaos.schedule import Fault, plan
from tests.chaos.scripted import ScriptedWorkload
from tests.chaos.workload import MODEL, ServedModel, Workload
from tests.conftest import ValkeyProcess
from tests.network.proxy import FAULTS

READY_S = 300.0
BALANCE_S = 90.0
AT_ONCE = 4  # faults in progress


@dataclass(frozen=True, slots=True)
class Options:
    """`worker_timeout_s` None: the default of the broker. `engine`: one of `ENGINES`.

    `limit_s`: no fault begins later; what was planned after that is left out.
    """

    seed: int
    faults: int
    workers: int = 3
    brokers: int = 2
    gateways: int = 2
    clients: int = 16
    longest_pause_s: float = 8.0
    worker_timeout_s: float | None = None
    engine: str = "scripted"
    limit_s: float = float("inf")
    log: Path | None = None

    @property
    def replay(self) -> str:
        """The command that repeats this run."""
        timeout = "" if self.worker_timeout_s is None else f" --worker-timeout-s {self.worker_timeout_s:g}"
        return (
            f"python -m tests.chaos --seed {self.seed} --faults {self.faults} --workers {self.workers} "
            f"--brokers {self.brokers} --gateways {self.gateways} --clients {self.clients} "
            f"--longest-pause-s {self.longest_pause_s:g} --engine {self.engine}{timeout}"
        )


#: A run of few faults rehearses few requests, so that it stays short.
ENGINES: dict[str, Callable[[Options], Workload]] = {
    "scripted": lambda options: ScriptedWorkload(options.seed),
    "real": lambda options: RealWorkload(options.seed, variants=1 + options.faults // 5),
}


@dataclass
class Outcome:
    """`hits`: each fault and when it struck; `periods` has those that are over. `killed`: ids of workers.

    `samples`: what ran on workers that were killed. `complaints` is empty if every promise was kept.
    """

    options: Options
    hits: list[tuple[Fault, float]] = field(default_factory=list)
    periods: list[Period] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stories: list[Story] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    denied: int = 0
    seconds: float = 0.0

    def reasons(self) -> Counter[str]:
        """How the requests ended."""
        return Counter(s.finish_reason or "no end" for s in self.stories)

    def num_wronged(self) -> int:
        """Requests that were quarantined although a worker that they are said to have killed was not."""
        return sum(
            s.finish_reason == "poison" and not self.killed.issuperset(s.dead_workers) for s in self.stories
        )


def run(options: Options) -> Outcome:
    """Runs the schedule of a seed; raises only if the fleet cannot be started."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "data").mkdir()
        workload = ENGINES[options.engine](options)
        served = workload.serve(root)
        valkey = ValkeyProcess(root / "data")
        valkey.start()
        try:
            log = options.log.open("w", buffering=1) if options.log else None
            started = time.monotonic()

            def report(name: str, line: str) -> None:
                if log is not None:
                    log.write(f"{time.monotonic() - started:9.3f} {name} | {line}\n")

            with CutFleet(_fleet_options(options, served, valkey.url), report) as fleet:
                load_model(fleet, served)
                outcome = asyncio.run(_Run(options, fleet, valkey, workload).run(served.pace))
            if log is not None:
                log.close()
            return outcome
        finally:
            valkey.kill()


def load_model(fleet: CutFleet, served: ServedModel) -> None:
    """Comes again while it is denied: a worker may just count as dead."""
    until = time.monotonic() + READY_S
    while True:
        try:
            fleet.load_model(MODEL, served.path, served.options)
            return
        except StatusError as e:
            if e.status != pb.ALLSPARK_REQUEST_DENIED or time.monotonic() > until:
                raise
            time.sleep(max(0.1, e.retry_after_ms / 1000))  # as the denial asks


def _fleet_options(options: Options, served: ServedModel, redis: str) -> FleetOptions:
    timeout = options.worker_timeout_s
    return FleetOptions(
        workers=options.workers,
        brokers=options.brokers,
        gateways=options.gateways,
        redis=redis,
        model_roots=served.roots,
        drain_s=5.0,
        start_timeout_s=READY_S,
        worker_command=served.worker_command,
        worker_args=served.worker_args,
        broker_args=() if timeout is None else (f"--worker-timeout-s={timeout}",),
    )


class _Run:
    def __init__(self, options: Options, fleet: CutFleet, valkey: ValkeyProcess, workload: Workload) -> None:
        self._options = options
        self._workload = workload
        self._fleet = fleet
        self._valkey = valkey
        self._groups = {"worker": fleet.workers, "broker": fleet.brokers, "gateway": fleet.gateways}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._is_quiet_at = 0.0  # by the monotonic clock: the consequences of all faults are over
        self._outcome = Outcome(options)

    async def run(self, pace: float) -> Outcome:
        """The schedule, with `pace` times its delays."""
        await self._workload.rehearse(self._fleet.addresses)
        options, outcome, began = self._options, self._outcome, time.monotonic()
        sizes = {kind: len(group) for kind, group in self._groups.items()} | {"store": 1}
        sizes |= self._fleet.num_links()
        faults = plan(options.seed, options.faults, sizes, options.longest_pause_s)
        store = Store(self._valkey.url, patience_s=None)
        load = Load(self._workload, self._fleet.client_addresses(), store, options.clients)
        loading = asyncio.create_task(load.run())
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                if time.monotonic() - began > options.limit_s:
                    break
                await asyncio.sleep(pace * fault.delay_s)  # the schedule
                places = AT_ONCE if fault.alone else 1
                for _ in range(places):
                    await self._room.acquire()
                if fault.alone:
                    await asyncio.sleep(self._is_quiet_at - time.monotonic())  # the schedule
                task = group.create_task(self._guarded(fault, places, load, store))
                if fault.alone:
                    await asyncio.gather(task, asyncio.sleep(LIMIT_S))  # no other fault blurs what follows
        load.finish()
        await loading
        outcome.stories, outcome.denied = load.stories, load.denied
        outcome.complaints += load.complaints + await balance(store, self._fleet.addresses)
        await store.close()
        outcome.seconds = time.monotonic() - began
        return outcome

    async def _guarded(self, fault: Fault, places: int, load: Load, store: Store) -> None:
        try:
            async with self._locks.setdefault((fault.kind, fault.target), asyncio.Lock()):
                began = time.monotonic()
                self._outcome.hits.append((fault, began))
                await asyncio.gather(self._hit(fault), self._observe(fault, began, load, store))
                ended = time.monotonic()
                self._is_quiet_at = max(self._is_quiet_at, ended + fault.settle_s)
                self._outcome.periods.append(Period(fault, began, ended))
        except Exception as e:  # noqa: BLE001 - a process that does not come back is a finding
            self._outcome.complaints.append(f"{fault}: {e!r}")
        finally:
            for _ in range(places):
                self._room.release()

    async def _observe(self, fault: Fault, began: float, load: Load, store: Store) -> None:
        """Notes what ran on a worker that was just killed."""
        if fault.name == "worker kill":
            worker_id = self._fleet.workers[fault.target].ready["worker"]
            self._outcome.samples += await samples(store, worker_id, began, load.stories)

    async def _hit(self, fault: Fault) -> None:
        if fault.kind == "store":
            await self._hit_store(fault)
            return
        if fault.way:
            await self._cut(fault)
            return
        process: ManagedProcess = self._groups[fault.kind][fault.target]
        if fault.action == "pause":
            process.signal(signal.SIGSTOP)
            await asyncio.sleep(fault.pause_s)  # what the fault is
            process.signal(signal.SIGCONT)
        elif fault.action == "kill":
            process.forgive()
            starts = process.num_starts
            if fault.kind == "worker":
                self._outcome.killed.add(process.ready["worker"])
            process.kill()
            await asyncio.to_thread(process.wait_ready, READY_S, starts + 1)
        else:
            await asyncio.to_thread(self._fleet.replace, process)

    async def _hit_store(self, fault: Fault) -> None:
        if fault.action == "kill":
            self._valkey.kill()
            await asyncio.to_thread(self._valkey.start)
        elif self._valkey.process is not None:
            self._valkey.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(fault.pause_s)  # what the fault is
            self._valkey.process.send_signal(signal.SIGCONT)

    async def _cut(self, fault: Fault) -> None:
        proxies = self._fleet.links(fault.kind, fault.target)
        for proxy in proxies:
            await asyncio.to_thread(proxy.set, FAULTS[fault.way])
        await asyncio.sleep(fault.pause_s)  # what the fault is
        for proxy in proxies:
            await asyncio.to_thread(proxy.heal)


async def balance(store: Store, addresses: Sequence[str]) -> list[str]:
    """Soon after the last release ledgers balance, and only the model and tombstones are left."""
    until = time.monotonic() + BALANCE_S
    async with AsyncClient(addresses, timeout_s=5.0) as client:
        while True:
            stat = await client.stat(MODEL)
            used = (stat.used_span, stat.pendding_request, stat.running_request)
            is_idle = not any(used) and stat.free_span == stat.total_span > 0
            what = f"of {stat.total_span} spans {stat.free_span} are free; used, pending, running: {used}"
            wrong = [] if is_idle else [f"when idle, {what}"]
            wrong += await _leftovers(store)
            if not wrong or time.monotonic() > until:
                return wrong
            await asyncio.sleep(0.2)  # brokers tidy up in intervals


async def _leftovers(store: Store) -> list[str]:
    allowed = {keys.MODELS, keys.BROKERS, keys.model(MODEL)}
    found = {k.decode() for k in await store.command("KEYS", "*")} - allowed
    tombstones = {k for k in found if k.startswith("as:req:")}
    states = await store.batch([("HGET", k, "st") for k in sorted(tombstones)])
    left = [k for k, state in zip(sorted(tombstones), states, strict=True) if state != b"released"]
    return [f"left in the store: {k}" for k in sorted(found - tombstones) + left]
