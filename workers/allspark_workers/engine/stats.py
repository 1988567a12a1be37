"""Counters of an engine and the snapshot made from them (spec 2.6.5)."""

from __future__ import annotations

from allspark_workers.engine.inbox import Inbox
from allspark_workers.engine.kv import KVLayout
from allspark_workers.engine.rates import RateWindow
from allspark_workers.engine.scheduler import Scheduler
from allspark_workers.engine.sharing import members_of
from allspark_workers.engine.step_plan import Row
from allspark_workers.engine.step_times import StepTimes
from allspark_workers.engine.types import EngineStat


class Counters:
    """Since the model was started, warm-up excluded. Written by the engine thread, read by any."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_step_s = 0.0
        self.num_generated = 0
        self.num_prefilled = 0
        self.num_cached = 0
        self.generate_rate = RateWindow()
        self.prefill_rate = RateWindow()
        self.times = StepTimes()

    def step(
        self, rows: list[Row], num_generated: int, num_prefilled: int, num_cached: int, now_s: float
    ) -> None:
        """A step of these rows is over that gave so many new tokens and put so many prompt tokens behind it.

        `num_cached` of the latter came from the prefix cache.
        """
        self.num_steps += 1
        self.last_step_s = now_s
        self.num_generated += num_generated
        self.num_prefilled += num_prefilled
        self.num_cached += num_cached
        self.generate_rate.add(num_generated, now_s)
        self.prefill_rate.add(num_prefilled - num_cached, now_s)
        chunks = [row.count for row in rows if row.count > 1]
        self.times.step(len(rows) - len(chunks), sum(chunks), num_prefilled, now_s)


def engine_stat(
    scheduler: Scheduler, inbox: Inbox, layout: KVLayout, counters: Counters, weight_bytes: int, now_s: float
) -> EngineStat:
    """All values at once; frames are spans times `2 * num_layers`."""
    ledger, frames = scheduler.ledger, 2 * layout.num_layers
    free = ledger.free - ledger.num_idle  # what the prefix cache keeps is used, though it may be had
    hits, prefilled = counters.num_cached, counters.num_prefilled  # in this order: never fewer than hits
    misses = prefilled - hits if scheduler.prefix is not None else 0
    used = layout.num_spans - free
    prompt_left, output_left = _left(scheduler, inbox)
    return EngineStat(
        total_span=layout.num_spans * frames,
        used_span=used * frames,
        free_span=free * frames,
        free_token=free * layout.span_size,
        span_size=layout.frame_bytes,
        pending_request=len(scheduler.waiting) + len(inbox.submitted()),
        running_request=len(scheduler.running),
        total_device_memory_pool_size=weight_bytes + layout.num_spans * layout.bytes_per_span,
        used_device_memory_pool_size=weight_bytes + used * layout.bytes_per_span,
        total_generated_token=counters.num_generated,
        total_prefill_token=prefilled,
        generate_token_persec=counters.generate_rate.rate(now_s),
        process_token_persec=counters.prefill_rate.rate(now_s),
        prefix_cache_hit_token=hits,
        prefix_cache_miss_token=misses,
        prefix_cache_hit_rate=hits / (hits + misses) if hits + misses else 0.0,
        prefix_cache_miss_rate=misses / (hits + misses) if hits + misses else 0.0,
        steps=counters.num_steps,
        last_step_s=counters.last_step_s,
        full_step_s=counters.times.step_s(scheduler.max_batch),
        next_step_s=counters.times.step_s(min(scheduler.max_batch, len(scheduler.running) + 1)),
        prompt_token_s=counters.times.prompt_token_s(),
        prompt_left=prompt_left,
        output_left=output_left,
    )


def _left(scheduler: Scheduler, inbox: Inbox) -> tuple[int, int]:
    """Known tokens that are still to be computed, and those that may still be generated, of all requests."""
    prompt = output = 0
    for seq in [*scheduler, *inbox.submitted()]:
        remaining = seq.num_remaining
        prompt += remaining if remaining > 1 else 0
        if not (seq.is_probe or seq.is_inference):
            limit = seq.request.params.max_length
            output += sum(max(0, limit - member.length) for member in members_of(seq))
    return prompt, output
