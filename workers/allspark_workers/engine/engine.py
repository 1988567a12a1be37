"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from allspark_workers.engine.admission import check_request
from allspark_workers.engine.graphs import is_worth_capturing
from allspark_workers.engine.inbox import Command, Inbox, Verb
from allspark_workers.engine.kv import KVLayout, allocate_kv, plan_kv
from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.profiler import Profiler
from allspark_workers.engine.runner import Runner
from allspark_workers.engine.scheduler import Row, Scheduler
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.stats import Counters, engine_stat
from allspark_workers.engine.threads import apply_threads
from allspark_workers.engine.types import (
    EngineRequest,
    EngineStat,
    FinishReason,
    GenerationParams,
    ModelConfig,
    ModelFacts,
    StepOutput,
)
from allspark_workers.models.loader import Model

logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 3
_WARM_UP_TOKENS = 64


class Engine:
    """Continuous batching of one model on one device.

    One thread calls `step` in a loop; `submit`, `cancel`, `hold`, `resume`, `stat` and `profile` may be
    called from any. Every submitted request gets exactly one output whose `finish` is set, unless `stop`
    comes first. `profile_enabled` may be set at any time.
    """

    def __init__(
        self, model: Model, config: ModelConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.profile_enabled = False
        self._model = model
        self._config = config
        self._clock = clock
        self._layout = plan_kv(model, config)
        self._facts = _facts(model, config, self._layout)
        self._inbox = Inbox()
        self._profiler = Profiler()
        self._counters = Counters()
        self._scheduler = self._new_scheduler()
        self._runner: Runner | None = None
        self._outputs: list[StepOutput] = []
        self._serials = itertools.count()
        # Nothing can run until a command arrives or a deadline passes: every live request is held.
        self._is_stalled = False

    @property
    def facts(self) -> ModelFacts:
        """What is known about the model; constant."""
        return self._facts

    def start(self) -> None:
        """Allocate the KV cache, warm up, capture decode steps where the device can. Blocks.

        Raises ModelMemoryError if the cache does not fit.
        """
        apply_threads(self._config.num_threads)
        self._scheduler = self._new_scheduler()
        self._counters = Counters()
        cache = allocate_kv(self._model, self._layout)
        runner = Runner(self._model, cache, self._scheduler, self._profiler)
        self._warm_up(runner)
        if is_worth_capturing(self._model):
            runner.capture(self._facts.max_length)
        self._runner = runner

    def stop(self) -> None:
        """Free the KV cache and forget live requests without output; `start` may follow.

        Must not run while another thread is inside `step`.
        """
        self._runner = None
        self._inbox.clear()
        self._scheduler = self._new_scheduler()
        self._is_stalled = False

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; a newer epoch of a live id replaces the older one (which ends as STOPPED).

        Raises ValueError for a request that is impossible here, and for an id that is already live.
        """
        if self._runner is None:
            raise ValueError(f"request {request.request_id}: the model is not started")
        check_request(request, self._facts.vocab_size, self._model.max_length)
        self._inbox.submit(Sequence(request, next(self._serials)))

    def cancel(self, request_id: str) -> None:
        """End a request with STOPPED; a token being computed at this moment is dropped."""
        self._inbox.put(Verb.CANCEL, request_id)

    def hold(self, request_id: str) -> None:
        """Pause a request; at most the token of the step in progress still comes."""
        self._inbox.put(Verb.HOLD, request_id)

    def resume(self, request_id: str) -> None:
        """Go on with a held request."""
        self._inbox.put(Verb.RESUME, request_id)

    def has_work(self) -> bool:
        """Whether `step` would do something now."""
        if self._inbox:
            return True
        if not self._is_stalled and self._scheduler.has_work():
            return True
        deadline_s = self._scheduler.next_deadline_s()
        return deadline_s is not None and deadline_s <= self._clock()

    def wait_for_work(self, timeout: float) -> bool:
        """Block until there is work, at most `timeout` seconds; for the engine thread."""
        if self.has_work():
            return True
        deadline_s = self._scheduler.next_deadline_s()
        if deadline_s is not None:
            timeout = min(timeout, max(0.0, deadline_s - self._clock()))
        self._inbox.wait(timeout)
        return self.has_work()

    def step(self) -> list[StepOutput]:
        """Compute one step; the tokens and endings it produced."""
        if self._runner is None:
            raise RuntimeError("step called on an engine that is not started")
        is_profiled = self.profile_enabled
        self._take_commands()
        self._expire()
        with self._profiler.measure("alloc", "Schedule", is_profiled):
            plan = self._scheduler.schedule()
        for seq in plan.exhausted:
            self._finish(seq, FinishReason.CACHE_MEMORY, message=self._too_large(seq))
        if plan.rows:
            is_prefill = any(row.count > 1 for row in plan.rows)
            self._profiler.phase = "prefill" if is_prefill else "decode"
            results = self._compute(self._runner, plan.rows, is_profiled)
            self._take_commands()  # a request cancelled meanwhile gets no further token
            self._commit_all(plan.rows, results)
        self._is_stalled = not (plan.rows or plan.exhausted or plan.preempted)
        outputs, self._outputs = self._outputs, []
        return outputs

    def stat(self) -> EngineStat:
        """A snapshot of the counters."""
        scheduler, layout, counters = self._scheduler, self._layout, self._counters
        return engine_stat(scheduler, self._inbox, layout, counters, self._model.weight_bytes, self._clock())

    def profile(self, reset: bool = True) -> str:
        """Measured time per operator (layout of GetOpProfilingInfo); empty if nothing was measured."""
        return self._profiler.text(reset)

    def check(self) -> None:
        """Raise unless pages, rows and requests balance; call it while no step is running."""
        self._scheduler.check()

    def _new_scheduler(self) -> Scheduler:
        layout, config = self._layout, self._config
        return Scheduler(
            PageLedger(layout.num_spans),
            layout.span_size,
            config.batch_limit,
            config.prefill_chunk,
            self._model.max_length,
        )

    def _warm_up(self, runner: Runner) -> None:
        """Run a few steps: compiles kernels, starts threads, touches the weights. Not counted."""
        length = max(1, min(_WARM_UP_TOKENS, self._facts.max_length - _WARM_UP_STEPS))
        params = GenerationParams(
            max_length=length + _WARM_UP_STEPS, do_sample=True, top_k=20, top_p=0.9, repetition_penalty=1.1
        )
        seq = Sequence(EngineRequest("warm-up", 0, np.zeros(length, np.int64), params), 0)
        self._scheduler.add(seq)
        for _ in range(_WARM_UP_STEPS):
            rows = self._scheduler.schedule().rows
            tokens = runner.run(rows)
            for row in rows:
                self._scheduler.commit(row)
            for token in tokens:
                seq.append(token)
        self._scheduler.remove(seq)

    def _take_commands(self) -> None:
        for command in self._inbox.take():
            self._is_stalled = False
            if command.sequence is not None:
                self._begin(command.sequence)
            else:
                self._obey(command)

    def _begin(self, seq: Sequence) -> None:
        self._scheduler.add(seq)
        # A worker that died between its last token and the terminal record leaves a complete stream behind.
        reason = seq.constraints.finish(seq) if seq.num_generated else None
        if reason is not None:
            self._finish(seq, reason)

    def _obey(self, command: Command) -> None:
        seq = self._scheduler.get(command.request_id)
        if seq is None:
            return
        if command.verb is Verb.CANCEL:
            self._finish(seq, FinishReason.STOPPED)
        else:
            seq.is_held = command.verb is Verb.HOLD

    def _expire(self) -> None:
        now_s = self._clock()
        for seq in self._scheduler.expired(now_s):
            late_s = now_s - (seq.request.deadline_s or now_s)
            self._finish(seq, FinishReason.DEADLINE, message=f"the deadline passed {late_s:.3f} s ago")

    def _compute(self, runner: Runner, rows: list[Row], is_profiled: bool) -> list[int | Exception | None]:
        """Per row: the next token, None if it does not sample yet, or why it failed."""
        try:
            return _spread(rows, runner.run(rows, is_profiled))
        except torch.AcceleratorError:
            raise  # the device's context is lost: nothing in this process can compute on it any more
        except Exception as error:  # noqa: BLE001 - request border: the culprit fails alone, below
            logger.warning("a step of %d requests failed (%s): running each alone", len(rows), error)
            runner.forget(rows)
        results: list[int | Exception | None] = []
        for row in rows:
            try:
                results += _spread([row], runner.run([row], is_profiled))
            except torch.AcceleratorError:
                raise
            except Exception as error:
                logger.exception("request %s failed in its step", row.sequence.request_id)
                runner.forget([row])
                results.append(error)
        return results

    def _commit_all(self, rows: list[Row], results: list[int | Exception | None]) -> None:
        """Take over what the step computed, except for requests that ended meanwhile."""
        generated = prefilled = 0
        for row, result in zip(rows, results, strict=True):
            seq = row.sequence
            if seq.is_done:
                continue
            if isinstance(result, Exception):
                self._finish(seq, FinishReason.ERROR, message=f"{type(result).__name__}: {result}")
                continue
            self._scheduler.commit(row)
            prefilled += seq.count_prefilled()
            if result is not None:
                generated += self._append(seq, result)
        self._counters.step(generated, prefilled, self._clock())

    def _append(self, seq: Sequence, token: int) -> int:
        """Add a token to its request, or end the request if there is none; the number of tokens added."""
        if token < 0:
            self._finish(seq, FinishReason.ERROR, message="the model produced no finite logit")
            return 0
        position = seq.num_generated
        seq.append(token)
        reason = seq.constraints.finish(seq)
        if reason is None:
            self._outputs.append(StepOutput(seq.request_id, seq.request.epoch, position, [token]))
        else:
            self._finish(seq, reason, [token], position)
        return 1

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        tokens: list[int] | None = None,
        position: int | None = None,
        message: str = "",
    ) -> None:
        """The one place where a request ends."""
        self._scheduler.remove(seq)
        self._inbox.ended(seq.request_id, seq.request.epoch)
        where = seq.num_generated if position is None else position
        output = StepOutput(seq.request_id, seq.request.epoch, where, tokens or [], reason, message)
        self._outputs.append(output)

    def _too_large(self, seq: Sequence) -> str:
        return (
            f"{seq.length} tokens need {self._scheduler.spans_for(seq.length)} KV spans, "
            f"the whole pool has {self._layout.num_spans}: use a shorter request or more KV memory"
        )


def _spread(rows: list[Row], tokens: list[int]) -> list[int | Exception | None]:
    drawn = iter(tokens)
    return [next(drawn) if row.samples else None for row in rows]


def _facts(model: Model, config: ModelConfig, layout: KVLayout) -> ModelFacts:
    arch = model.arch
    return ModelFacts(
        model_type=arch.family,
        vocab_size=arch.vocab_size,
        max_length=min(model.max_length, layout.num_tokens),
        max_batch=config.batch_limit,
        num_layers=arch.num_layers,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        span_size=layout.span_size,
        span_bytes=layout.frame_bytes,
        eos_token_ids=arch.eos_token_ids,
        dtype=model.dtype_name,
        device=str(model.device),
        weight_bytes=model.weight_bytes,
        digest=model.digest,
        cache_mode=config.cache_mode,
    )
