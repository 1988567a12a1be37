"""The two measurements of ``allspark bench``: the engine in this process, and a fleet through gRPC.

Both are given the same random prompts, decode greedily and ignore the end-of-text token, so both compute
the same tokens.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from allspark_workers.engine.types import EngineRequest, GenerationParams
from allspark_workers.ports import EnginePort

from allspark.client import AsyncClient, GenerateOptions


@dataclass
class Timeline:
    """When tokens of one request arrived, in seconds since all requests were submitted."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def add(self, at_s: float, num_tokens: int) -> None:
        """Note that so many tokens arrived together."""
        self.arrivals.append((at_s, num_tokens))

    @property
    def first_s(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        """Time to last token."""
        return self.arrivals[-1][0]

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(tokens for _, tokens in self.arrivals)

    def tokens_after(self, at_s: float) -> int:
        """Tokens that arrived later than that."""
        return sum(tokens for at, tokens in self.arrivals if at > at_s)


@dataclass(frozen=True)
class Result:
    """One measurement.

    ``decode`` counts from the moment every request has its first token, ``total`` from the submission on,
    prefill included; both are tokens per second over all requests. ``ttft_ms`` is the median over them.
    """

    decode: float
    total: float
    ttft_ms: float


def result_of(timelines: Sequence[Timeline]) -> Result:
    """The figures of one run."""
    all_started = max(timeline.first_s for timeline in timelines)
    end = max(timeline.last_s for timeline in timelines)
    decoded = sum(timeline.tokens_after(all_started) for timeline in timelines)
    return Result(
        decode=decoded / (end - all_started),
        total=sum(timeline.num_tokens for timeline in timelines) / end,
        ttft_ms=1000 * statistics.median(timeline.first_s for timeline in timelines),
    )


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Uniform ids: ``count`` prompts of ``length`` tokens."""
    drawn = np.random.default_rng(seed).integers(0, vocab_size, (count, length))
    return [[int(token) for token in row] for row in drawn]


def measure_engine(engine: EnginePort, prompts: Sequence[Sequence[int]], new_tokens: int) -> Result:
    """Step an engine in this thread until all prompts are done."""
    timelines = {f"bench-{index}": Timeline() for index in range(len(prompts))}
    started = time.monotonic()
    for (request_id, _), prompt in zip(timelines.items(), prompts, strict=True):
        params = GenerationParams(max_length=len(prompt) + new_tokens)
        ids = np.asarray(prompt, dtype=np.int64)
        engine.submit(EngineRequest(request_id, 1, ids, params, arrival_s=started))
    while engine.has_work():
        for output in engine.step():
            if output.tokens:
                timelines[output.request_id].add(time.monotonic() - started, len(output.tokens))
    _check(list(timelines.values()), new_tokens)
    return result_of(list(timelines.values()))


async def measure_fleet(
    addresses: Sequence[str], model: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Result:
    """Send all prompts at once through gRPC and read the streams until all are done."""
    timelines = [Timeline() for _ in prompts]
    options = GenerateOptions(max_new_tokens=new_tokens)
    async with AsyncClient(addresses) as client:
        await client.version()  # the connection is there before the clock starts
        started = time.monotonic()

        async def one(prompt: Sequence[int], timeline: Timeline) -> None:
            async with await client.submit(model, prompt, options) as request:
                async for ids in request.stream():
                    timeline.add(time.monotonic() - started, len(ids))

        await asyncio.gather(*map(one, prompts, timelines))
    _check(timelines, new_tokens)
    return result_of(timelines)


def _check(timelines: Sequence[Timeline], new_tokens: int) -> None:
    counts = {timeline.num_tokens for timeline in timelines}
    if counts != {new_tokens}:
        raise RuntimeError(f"asked for {new_tokens} tokens each, got {sorted(counts)}: nothing to compare")
