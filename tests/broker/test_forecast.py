"""Deadlines at ten times the load: a broker's decisions against engines that are simulated step by step."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from allspark_broker.affinity import PrefixAffinity
from allspark_broker.dispatcher import Dispatcher
from allspark_broker.forecast import MARGIN, MIN_SEEN, PREFILL_CHUNK, Forecast
from allspark_broker.queue import Ahead, RequestQueue
from allspark_broker.work import Work
from allspark_broker.workers import Flight, Worker, WorkerTable
from allspark_bus.ledger import Advance, Entry
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

BATCH, QUEUE_AHEAD = 16, 4
HEARTBEAT_S = 0.4
TIMES = 10
FLOOD_S = 40.0
CAPACITY = BATCH + QUEUE_AHEAD


@dataclass(slots=True)
class Running:
    """A request in a simulated engine, and what it will really generate."""

    rid: str
    prompt: int
    limit: int
    real: int
    computed: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Ranges of prompt, limit and the part of it that is used; seconds of an engine for each."""

    prompt: tuple[int, int] = (128, 128)
    limit: tuple[int, int] = (128, 128)
    use: tuple[float, float] = (1.0, 1.0)
    deadline_s: float = 10.0
    step_s: float = 0.010
    row_s: float = 0.001
    prompt_token_s: float = 0.0012
    workers: int = 1

    def seconds(self) -> float:
        """Of one engine for a request, on average."""
        prompt, limit, use = (sum(pair) / 2 for pair in (self.prompt, self.limit, self.use))
        full_s = self.step_s + BATCH * self.row_s
        return prompt * self.prompt_token_s + limit * use * full_s / BATCH


@dataclass
class Engine:
    """Continuous batching with chunked prefill, in virtual time; `figures` are what a worker would tell."""

    traffic: Traffic
    held: list[Running] = field(default_factory=list)
    free_at_s: float = 0.0
    largest: int = 0
    has_computed: bool = False

    def step(self, now_s: float) -> list[Running]:
        """One step that begins now; who ended with it."""
        rows = self.held[:BATCH]
        decoding = [r for r in rows if r.computed == r.prompt]
        budget = PREFILL_CHUNK
        for request in rows:
            chunk = min(budget, request.prompt - request.computed)
            request.computed += chunk
            budget -= chunk
        for request in rows:
            request.generated += request.computed == request.prompt and (request in decoding or budget >= 0)
        computed = PREFILL_CHUNK - budget
        self.has_computed = self.has_computed or computed > 0
        if not computed:
            self.largest = max(self.largest, len(decoding))
        t = self.traffic
        self.free_at_s = now_s + t.step_s + t.row_s * len(decoding) + t.prompt_token_s * computed
        ended = [r for r in rows if r.generated >= r.real]
        self.held = [r for r in self.held if r not in ended]
        return ended

    def figures(self) -> fleet.Progress:
        t, rows = self.traffic, self.largest
        known_s = (t.step_s + t.row_s * rows) * BATCH / rows if rows else 0.0
        next_s = t.step_s + t.row_s * min(BATCH, len(self.held) + 1)
        return fleet.Progress(
            full_step_s=known_s,
            next_step_s=next_s if rows else 0.0,
            prompt_token_s=t.prompt_token_s if self.has_computed else 0.0,
            prompt_left=sum(r.prompt - r.computed for r in self.held),
            output_left=sum(r.limit - r.generated for r in self.held),
        )


class World:
    """A dispatcher, its table and the engines behind it; time passes in `run_until`."""

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self.traffic, self.draw, self.now_s = traffic, random.Random(seed), 0.0
        self.table = WorkerTable(5.0, self.clock)
        affinity = PrefixAffinity(lambda model: None, self.clock)
        self.dispatcher = Dispatcher(
            self, self.table, self, lambda: RequestQueue(4096), affinity, lambda r: Work(0), self.clock
        )  # type: ignore[arg-type]
        self.engines = {f"w{n}": Engine(traffic) for n in range(traffic.workers)}
        self.requests: dict[str, Running] = {}
        self.ends_s: dict[str, float] = {}
        self.beat_s = 0.0
        self.beat()

    def clock(self) -> float:
        return self.now_s

    def beat(self) -> None:
        for name, engine in self.engines.items():
            facts = fleet.ModelFacts(max_batch=BATCH, max_length=8192)
            state = fleet.WorkerModel(name="m", state="running", capacity=CAPACITY, facts=facts)
            state.engine.CopyFrom(engine.figures())
            worker = self.table.get(name)
            if worker is None:
                self.table.announce(name, fleet.Announce(device="cpu", models=[state]))
            else:
                self.table.heartbeat(worker, fleet.WorkerHeartbeat(models=[state]))
        self.beat_s = self.now_s + HEARTBEAT_S

    # As the ledger and the link to the workers, for the dispatcher.

    async def advance(self, rid: str, epoch: int, worker: str, **_: Any) -> Advance:
        return Advance("ok", epoch + 1, worker, 0, 0)

    async def send(self, name: str, message: fleet.ToWorker) -> bool:
        engine = self.engines[name]
        if not engine.held:
            engine.free_at_s = self.now_s
        engine.held.append(self.requests[message.dispatch.request_id])
        worker = self.table.get(name)
        assert worker is not None
        self.table.accepted(
            worker, fleet.Accepted(request_id=message.dispatch.request_id, epoch=0, model="m")
        )
        worker.flights[message.dispatch.request_id].accepted = True
        return True

    async def run_until(self, end_s: float) -> None:
        while True:
            busy = [e.free_at_s for e in self.engines.values() if e.held]
            next_s = min([self.beat_s, *busy])
            if next_s >= end_s:
                break
            self.now_s = max(self.now_s, next_s)
            if next_s == self.beat_s:
                self.beat()
            for name, engine in self.engines.items():
                if engine.held and engine.free_at_s <= self.now_s:
                    await self.settle(name, engine)
        self.now_s = end_s

    async def settle(self, name: str, engine: Engine) -> None:
        """The step in progress is over: what it ended is told, and the next begins."""
        worker = self.table.get(name)
        assert worker is not None
        for request in engine.step(self.now_s):
            # It ends with the step that begins now; the broker hears of it a step early, which frees a place.
            self.ends_s[request.rid] = engine.free_at_s
            flight = worker.flights[request.rid]
            await self.dispatcher.ended(worker, request.rid, flight.epoch, request.generated)

    async def offer(self, number: int, deadline_s: float) -> bool:
        """A request comes; whether it is accepted."""
        t, rid = self.traffic, f"t/{number}"
        prompt, limit = self.draw.randint(*t.prompt), self.draw.randint(*t.limit)
        real = max(1, round(limit * self.draw.uniform(*t.use)))
        work = Work(prompt, limit)
        if deadline_s:
            outlook = self.dispatcher.outlook("m", "t", 0, work)
            if outlook.end_s is None or outlook.end_s > deadline_s:
                return False
        self.requests[rid] = Running(rid, prompt, limit, real)
        request = pb.StartRequestRequest(model_name="m")
        worker = self.dispatcher.reserve(request, rid, work)
        entry = Entry(rid, "m", 1, "", request.SerializeToString(), 0, 0, 0, 0, 0)
        await self.dispatcher.start(worker, entry, work)
        return True


async def flood(world: World, rate: float) -> tuple[list[str], dict[str, float]]:
    """Poisson arrivals of that rate for `FLOOD_S`: who was accepted, and when each came."""
    accepted, came_s, number = [], {}, len(world.requests)
    end_s = world.now_s + FLOOD_S
    while True:
        at_s = world.now_s + world.draw.expovariate(rate)
        if at_s > end_s:
            return accepted, came_s
        await world.run_until(at_s)
        number += 1
        if await world.offer(number, world.traffic.deadline_s):
            accepted.append(f"t/{number}")
            came_s[f"t/{number}"] = at_s


TRAFFIC = {
    "equal": Traffic(),
    "long prompts": Traffic(prompt=(1000, 3000), limit=(16, 64), deadline_s=20.0, prompt_token_s=0.0002),
    "early ends": Traffic(limit=(1024, 1024), use=(0.05, 0.2), deadline_s=20.0),
    "mixed": Traffic(prompt=(16, 2000), limit=(16, 128), deadline_s=25.0, prompt_token_s=0.0004),
    "two workers": Traffic(workers=2),
}


@pytest.mark.parametrize("after_calm", [False, True], ids=["cold", "after calm"])
@pytest.mark.parametrize("traffic", TRAFFIC.values(), ids=TRAFFIC.keys())
def test_who_is_accepted_ends_in_time_and_the_engines_are_kept_busy(
    traffic: Traffic, after_calm: bool
) -> None:
    async def run() -> tuple[int, int, float]:
        world = World(traffic, seed=10)
        sustainable = traffic.workers / traffic.seconds()
        if after_calm:  # small batches, which are fast, and tell little of full ones
            for number in range(60):
                await world.run_until(world.now_s + world.draw.expovariate(sustainable / 10))
                assert await world.offer(-number, 0.0)
            await world.run_until(world.now_s + 30)
        begin_s = world.now_s
        accepted, came_s = await flood(world, TIMES * sustainable)
        in_time = sum(world.ends_s.get(rid, 1e9) < begin_s + FLOOD_S for rid in accepted)
        await world.run_until(world.now_s + 200)
        late = sum(world.ends_s[rid] > came_s[rid] + traffic.deadline_s for rid in accepted)
        return late, len(accepted), in_time / (FLOOD_S * sustainable)

    late, accepted, utilisation = asyncio.run(run())
    print(f"accepted {accepted}, late {late}, {utilisation:.2f} of what the engines can do")
    assert late == 0
    assert utilisation > 0.6


def serving(figures: fleet.Progress, max_batch: int = 4, kv_tokens: int = 0) -> Worker:
    """A worker with such figures, told at time 0."""
    facts = fleet.ModelFacts(max_batch=max_batch, kv_tokens=kv_tokens)
    state = fleet.WorkerModel(name="m", state="running", capacity=max_batch + 4, facts=facts, engine=figures)
    return Worker("w", "cpu", 0.0, models={"m": state})


def test_before_anything_was_measured_nothing_is_known() -> None:
    forecast, worker = Forecast(), serving(fleet.Progress())
    assert forecast.end_s([worker], "m", Work(4, 8), Ahead(1, 4, 8), 0.0) is None
    assert forecast.end_s([], "m", Work(4, 8), Ahead(0), 0.0) is None
    measured = serving(fleet.Progress(full_step_s=0.1, prompt_token_s=0.01))
    known = forecast.end_s([measured], "m", Work(4, 8), Ahead(1, 4, 8), 0.0)
    assert known is not None and known > 8 * 0.1
    assert forecast.end_s([], "m", Work(4, 8), Ahead(1, 4, 8), 0.0) == known, "what its last worker measured"


def test_what_a_worker_has_left_counts_once_and_passes_with_time() -> None:
    """100 prompt tokens and 40 others in a batch of 4 are 1 s and 1 s. What it does not know yet is added."""
    forecast = Forecast()
    worker = serving(fleet.Progress(full_step_s=0.1, prompt_token_s=0.01, prompt_left=100, output_left=40))

    def wait_s(now_s: float) -> float:
        idle = serving(fleet.Progress(full_step_s=0.1, prompt_token_s=0.01))
        ends_s = [forecast.end_s([w], "m", Work(1, 1), Ahead(0), now_s) or 0.0 for w in (worker, idle)]
        return (ends_s[0] - ends_s[1]) / MARGIN

    assert wait_s(0.0) == pytest.approx(2.0)
    assert wait_s(0.5) == pytest.approx(1.5)
    assert wait_s(9.0) == 0.0
    worker.flights["t/told"] = Flight("t/told", "m", 1, 0.0, work=Work(100, 40), is_told=True)
    worker.flights["t/new"] = Flight("t/new", "m", 1, 0.0, work=Work(50, 40))
    worker.flights["t/other"] = Flight("t/other", "n", 1, 0.0, work=Work(50, 40))
    assert wait_s(0.5) == pytest.approx(3.0)


def test_how_much_of_its_limit_a_request_uses_is_learned_but_not_from_a_few() -> None:
    forecast = Forecast()
    for _ in range(MIN_SEEN - 1):
        forecast.finished(Work(4, 1000), 100)
    assert forecast.use() == forecast.use(careful=True) == 1.0
    draw = random.Random(1)
    for _ in range(200):
        forecast.finished(Work(4, 1000), draw.randint(50, 150))
    assert 0.07 < forecast.use() < 0.13
    assert 0.15 <= forecast.use(careful=True) < 0.35
    for _ in range(30):
        forecast.finished(Work(4, 2000, rows=2), 1000)
    assert forecast.use() > 0.95, "each of two sequences to its end"


def test_one_that_runs_alone_is_never_too_late_and_one_beside_others_may_be() -> None:
    forecast = Forecast()
    worker = serving(fleet.Progress(full_step_s=0.2, next_step_s=0.1, prompt_token_s=0.01))
    for _ in range(MIN_SEEN):
        forecast.sent(Work(10, 100))
        forecast.finished(Work(10, 100), 100)
    assert forecast.at_once_s([worker], "m", Work(10, 100)) == 0.0
    worker.flights["t/1"] = Flight("t/1", "m", 1, 0.0, work=Work(10, 100))
    beside_one = forecast.at_once_s([worker], "m", Work(10, 100))
    assert beside_one > MARGIN * 100 * 0.1
    worker.flights["t/2"] = Flight("t/2", "m", 1, 0.0, work=Work(10, 100))
    assert forecast.at_once_s([worker], "m", Work(10, 100)) > 1.9 * beside_one, "the batch may fill up"


def test_a_batch_is_no_larger_than_the_kv_memory_has_room_for() -> None:
    forecast, worker = Forecast(), serving(fleet.Progress(), max_batch=32, kv_tokens=1000)
    assert forecast.rows(worker.models["m"]) == 32, "nobody has come yet"
    forecast.sent(Work(100, 100))
    assert forecast.rows(worker.models["m"]) == 5
    forecast.sent(Work(10**6, 10**6))
    assert forecast.rows(worker.models["m"]) == 1
