"""One soak: a fleet whose results expire within seconds, traffic of every sort, and restarts now and then."""

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allspark import demo_model
from allspark.client import GenerateOptions
from allspark.launcher import Fleet, FleetOptions, ManagedProcess
from allspark.text import load_tokenizer
from allspark_bus import keys
from allspark_bus.store import Store

from tests.chaos.real import ADAPTERS, RealWorkload, requests
from tests.chaos.scripted import ScriptedWorkload
from tests.chaos.workload import MODEL, Ask, ServedModel
from tests.conftest import ValkeyProcess
from tests.soak.samples import Accounts, Levels, Samples, of_store
from tests.soak.traffic import Place, Traffic
from tests.soak.verdict import Trend, held_longer, trend

TTL_S = 2.0
LEAST_IDLE_S = 6.0  # longer than a gateway stays subscribed to a stream that nobody reads any more
LONGEST_IDLE_S = 45.0
READY_S = 300.0
STORE = "store"


@dataclass(frozen=True, slots=True)
class Options:
    """`warm_up_s` of traffic come before the `seconds` that are judged. `restart_s` 0: no restarts.

    `least`: requests that are judged even if so many take longer than `seconds`.
    `rate`: requests that are begun in a second, if `clients` that wait for their answers can begin so many.
    """

    seed: int
    seconds: float = 600.0
    warm_up_s: float = 60.0
    rate: float = 144.0
    clients: int = 24
    least: int = 0
    idle_connections: int = 16
    restart_s: float = 20.0
    sample_s: float = 2.0
    engine: str = "scripted"
    log: Path | None = None


@dataclass
class Outcome:
    """`complaints` is empty if nothing grew, nothing is left in the store, and no call failed oddly."""

    options: Options
    counts: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    seconds: float = 0.0
    samples: Samples = field(default_factory=Samples)
    trends: list[Trend] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def run(options: Options) -> Outcome:
    """Raises only if the fleet cannot be started."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "data").mkdir()
        served, adapters, ask = _work(options, root)
        accounts = Accounts()
        valkey = ValkeyProcess(root / "data")
        valkey.start()
        log = options.log.open("w") if options.log else None

        def hear(name: str, line: str) -> None:
            accounts.hear(name, line)
            if log is not None:
                log.write(f"{name} | {line[:400]}\n")

        try:
            with Fleet(_fleet_options(served, valkey.url), hear) as fleet:
                fleet.load_model(MODEL, served.path, served.options)
                place = Place(fleet.addresses, fleet.frontends, served, adapters)
                return asyncio.run(_Soak(options, fleet, valkey, accounts).run(place, ask))
        finally:
            valkey.kill()
            if log is not None:
                log.close()


def _work(
    options: Options, root: Path
) -> tuple[ServedModel, tuple[str, ...], Callable[[random.Random], Ask]]:
    """What is served, adapters, and how a request is made."""
    if options.engine == "real":
        served = RealWorkload(options.seed, 1).serve(root)
        pool = requests(options.seed, 2, load_tokenizer(demo_model.fetch()).eos_ids[0])
        return served, ADAPTERS, lambda rng: rng.choice(pool)
    served = ScriptedWorkload(options.seed).serve(root)
    served.path.write_text(json.dumps({"max_length": 512, "max_batch": 32, "step_s": 0.004}))
    return served, tuple(f"adapter-{n}" for n in range(40)), _short


def _short(rng: random.Random) -> Ask:
    # Long ones, so that the brokers' bounded map of prompt prefixes is full after the warm-up.
    prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(200, 400))]
    return Ask(prompt, GenerateOptions(max_new_tokens=rng.randint(1, 10), seed=rng.randrange(1 << 31)))


def _fleet_options(served: ServedModel, redis: str) -> FleetOptions:
    return FleetOptions(
        workers=2,
        brokers=2,
        gateways=2,
        redis=redis,
        model_roots=served.roots,
        drain_s=5.0,
        start_timeout_s=READY_S,
        worker_command=served.worker_command,
        worker_args=served.worker_args,
        broker_args=(f"--result-ttl-s={TTL_S}", f"--tombstone-ttl-s={TTL_S}"),
    )


class _Soak:
    def __init__(self, options: Options, fleet: Fleet, valkey: ValkeyProcess, accounts: Accounts) -> None:
        self._options = options
        self._fleet = fleet
        self._valkey = valkey
        self._accounts = accounts
        self._store = Store(valkey.url, patience_s=None)
        self._outcome = Outcome(options)
        self._is_over = asyncio.Event()
        self._num_begun = lambda: 0

    async def run(self, place: Place, ask: Callable[[random.Random], Ask]) -> Outcome:
        options, outcome = self._options, self._outcome
        traffic = Traffic(place, ask, options.seed, options.rate)
        self._num_begun = lambda: traffic.num_requests
        await traffic.connect_idle(options.idle_connections)
        await traffic.run(options.warm_up_s, options.clients)
        before = await self._idle({})
        warm = traffic.num_requests
        began = time.monotonic()
        duties = [asyncio.ensure_future(duty) for duty in (self._sample(), self._restart())]
        await traffic.run(options.seconds, options.clients, options.least)
        self._is_over.set()
        for result in await asyncio.gather(*duties, return_exceptions=True):
            if isinstance(result, Exception):
                outcome.complaints.append(repr(result))
        outcome.seconds = time.monotonic() - began
        await self._all_ready()
        after = await self._idle(before)
        for process, levels in after.items():
            outcome.complaints += held_longer(process, before[process], levels)
        outcome.complaints += [f"left in the store: {key}" for key in await self._leftovers()]
        outcome.counts += traffic.counts
        outcome.num_requests = traffic.num_requests - warm
        outcome.complaints += traffic.complaints
        await traffic.close()
        await self._store.close()
        self._judge()
        return outcome

    def _judge(self) -> None:
        outcome = self._outcome
        outcome.trends = [
            trend(process, quantity, points, outcome.samples.rates)
            for process, known in outcome.samples.series.items()
            for quantity, points in sorted(known.items())
            if len(points) >= 20  # fewer say nothing about a slope
        ]
        outcome.complaints += [
            f"{t.process}: {t.quantity} grew by {t.growth:.0f} in the second half (bound {t.bound:.0f})"
            for t in outcome.trends
            if t.is_growth
        ]

    def _watched(self) -> list[ManagedProcess]:
        """The first of each kind is never restarted, so whatever it holds adds up."""
        return [self._fleet.gateways[0], self._fleet.brokers[0], self._fleet.workers[0]]

    async def _levels(self) -> dict[str, Levels]:
        watched = self._watched()
        found = await asyncio.gather(*[self._accounts.of(process) for process in watched])
        levels = {process.name: levels for process, levels in zip(watched, found, strict=True)}
        if self._valkey.process is not None:
            levels[STORE] = await of_store(self._store, self._valkey.process.pid)
        return levels

    async def _sample(self) -> None:
        while await self._goes_on(self._options.sample_s):
            self._outcome.samples.add(await self._levels(), self._num_begun())

    async def _idle(self, before: dict[str, Levels]) -> dict[str, Levels]:
        """Levels once everything has expired, and no higher than `before` if that takes a little longer."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(1.0)  # expiries are what is waited for
            levels, waited_s = await self._levels(), loop.time() - began
            higher = [c for p, found in before.items() for c in held_longer(p, found, levels[p])]
            is_settled = not higher and not await self._leftovers()
            is_settled &= bool(before) or waited_s >= LEAST_IDLE_S
            if is_settled or waited_s > LONGEST_IDLE_S:
                return levels

    async def _leftovers(self) -> list[str]:
        found = {key.decode() for key in await self._store.command("KEYS", "*")}
        return sorted(found - {keys.BROKERS, keys.MODELS, keys.model(MODEL)})

    async def _goes_on(self, interval_s: float) -> bool:
        """Waits for the interval; False as soon as the traffic is over."""
        try:
            await asyncio.wait_for(self._is_over.wait(), interval_s)
        except TimeoutError:
            return True
        return False

    # ---- restarts ---------------------------------------------------------------------------------

    async def _restart(self) -> None:
        """The second of each kind in turn, now killed, now upgraded."""
        turn = 0
        while self._options.restart_s and await self._goes_on(self._options.restart_s):
            group = (self._fleet.workers, self._fleet.brokers, self._fleet.gateways)[turn % 3]
            process = group[1]
            if turn % 2:
                await asyncio.to_thread(self._fleet.replace, process)
            else:
                process.forgive()
                starts = process.num_starts
                process.kill()
                await asyncio.to_thread(process.wait_ready, READY_S, starts + 1)
            self._outcome.counts["restarts"] += 1
            turn += 1

    async def _all_ready(self) -> None:
        for process in (*self._fleet.brokers, *self._fleet.gateways, *self._fleet.workers):
            await asyncio.to_thread(process.wait_ready, READY_S)
