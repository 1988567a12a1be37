"""When a request would end: by what its model's engines measured and have left, and what is before it. Pure.

In a full batch of B rows an engine spends pi seconds on a prompt token and tau / B on each generated one, tau
being the time of a step (continuous batching computes all rows at once, prompts in between). As long as
somebody waits all rows are taken, so what is before a request has begun after the sum of that work at the
latest (Graham, "Bounds for Certain Multiprocessing Anomalies", 1966: a list schedule leaves no machine idle).
Then it takes pi for each prompt token and tau for each of its steps, and waits for the prompts of those that
take the places of others that end meanwhile.

Requests may end before their limit. What part of it they use is learned from those that have finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allspark_proto import fleet_pb2 as fleet

from allspark_broker.queue import Ahead
from allspark_broker.work import Work
from allspark_broker.workers import Worker

#: Fewer observations are no ground to expect less than what a request may generate.
MIN_SEEN = 8
#: Weights of the newest sample in a mean and its mean deviation, and how many deviations a careful estimate
#: adds: as TCP estimates its round trips (RFC 6298, section 2).
GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 4, 4
#: Forecasts are longer than the model says: steps are slower now and then, and later tokens attend to more.
MARGIN = 1.25
#: Prompt tokens that an engine computes beside a step's decoding rows, at most.
PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Outlook:
    """`ahead` requests wait before it. `end_s`: until it has ended; 0: that matters to it alone; None: it
    would wait, and nobody knows for how long.
    """

    ahead: int
    end_s: float | None


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of an engine whose batch is full: for a prompt token, for a step, and its rows."""

    prompt_s: float
    step_s: float
    rows: int

    def of(self, prompt: float, output: float) -> float:
        """What so many tokens cost."""
        return prompt * self.prompt_s + output * self.step_s / self.rows


class Forecast:
    """Of one model. `sent`, `finished` and `end_s` belong to the broker's loop."""

    def __init__(self) -> None:
        self._seen = 0
        self._use, self._deviation = 1.0, 0.5
        self._usual: tuple[float, float] | None = None  # prompt and output tokens of a request
        self._last: Price | None = None

    def sent(self, work: Work) -> None:
        """A request goes to a worker."""
        prompt, output = self._usual or (work.prompt, work.output)
        self._usual = prompt + GAIN * (work.prompt - prompt), output + GAIN * (work.output - output)

    def finished(self, work: Work, num_tokens: int) -> None:
        """A request generated so many tokens for each of its sequences."""
        use = min(1.0, num_tokens * work.rows / max(1, work.output))
        if self._seen == 0:
            self._use, self._deviation = use, use / 2
        else:
            self._deviation += DEVIATION_GAIN * (abs(use - self._use) - self._deviation)
            self._use += GAIN * (use - self._use)
        self._seen += 1

    def use(self, *, careful: bool = False) -> float:
        """The part of its limit that a request uses; careful: what few exceed."""
        if self._seen < MIN_SEEN:
            return 1.0
        return min(1.0, self._use + (DEVIATIONS * self._deviation if careful else 0.0))

    def rows(self, state: fleet.WorkerModel) -> int:
        """Requests that an engine computes at once: its batch, or what its KV memory has room for."""
        rows, kv_tokens = max(1, state.facts.max_batch), state.facts.kv_tokens
        if kv_tokens and self._usual is not None:
            prompt, output = self._usual
            rows = min(rows, int(kv_tokens / max(1.0, prompt + self.use() * output)))
        return max(1, rows)

    def price(self, state: fleet.WorkerModel) -> Price | None:
        """Of a worker that has measured its engine."""
        engine = state.engine
        if not engine.full_step_s:
            return None
        return Price(engine.prompt_token_s, engine.full_step_s, self.rows(state))

    def end_s(
        self, workers: Sequence[Worker], model: str, work: Work, ahead: Ahead, now_s: float
    ) -> float | None:
        """Seconds in which a request ends most likely that comes after `ahead` and all that `workers` hold.

        None: no engine of the model was ever measured.
        """
        known = [p for p in (self.price(w.models[model]) for w in workers) if p is not None]
        slowest = max(known, key=lambda price: price.of(work.prompt, work.output), default=self._last)
        if slowest is None:
            return None
        self._last = slowest
        left_s = sum(self._left_s(w, model, self.price(w.models[model]) or slowest, now_s) for w in workers)
        wait_s = (left_s + self._ahead_s(ahead, slowest)) / max(1, len(workers))
        return MARGIN * (max(wait_s, ahead.usual_s) + self._run_s(work, slowest, ahead))

    def at_once_s(self, workers: Sequence[Worker], model: str, work: Work) -> float:
        """Seconds in which a request ends that begins at once on one of `workers`, beside what they run now.

        A batch that it makes more than half full counts as full, since others may come.
        0, no matter how long, while it is not known how much of their limits requests use, and where it would
        run alone: nobody else suffers, and how long it runs is its client's choice.
        """
        if self._seen < MIN_SEEN:
            return 0.0
        longest_s = 0.0
        for worker in workers:
            engine, rows = worker.models[model].engine, worker.rows(model)
            if not rows or not engine.next_step_s:
                return 0.0
            price = Price(engine.prompt_token_s, engine.next_step_s, rows + work.rows)
            if 2 * price.rows > self.rows(worker.models[model]):
                price = self.price(worker.models[model]) or price
            longest_s = max(longest_s, MARGIN * self._run_s(work, price, Ahead(0)))
        return longest_s

    def _ahead_s(self, ahead: Ahead, price: Price) -> float:
        prompt, output = self._usual or (0.0, 0.0)
        prompt, output = ahead.prompt + ahead.unknown * prompt, ahead.output + ahead.unknown * output
        return price.of(prompt, self.use() * output)

    def _left_s(self, worker: Worker, model: str, price: Price, now_s: float) -> float:
        """Until a worker is through with what it holds."""
        told = worker.models[model].engine
        left_s = price.of(told.prompt_left, self.use() * told.output_left)
        left_s = max(0.0, left_s - max(0.0, now_s - worker.told_s))
        for flight in worker.flights.values():
            if flight.model == model and not flight.is_told and flight.work is not None:
                left_s += price.of(flight.work.prompt, self.use() * flight.work.output)
        return left_s

    def _run_s(self, work: Work, price: Price, ahead: Ahead) -> float:
        """From when it begins until it ends."""
        steps = self.use(careful=True) * work.output / work.rows
        usual = self._usual or (work.prompt, work.output)
        mixes = [usual, (ahead.prompt / max(1, ahead.requests), ahead.output / max(1, ahead.requests))]
        # While it takes a step, the others take one too. As many of them end, and others begin, with prompts.
        begun = max(prompt / max(1.0, self.use() * output) for prompt, output in mixes)
        stall_s = min(begun * (price.rows - work.rows), PREFILL_CHUNK) * price.prompt_s
        return work.prompt * price.prompt_s + steps * (price.step_s + stall_s)
