"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from allspark_workers.engine.adapters import AdapterPool
from allspark_workers.engine.admission import check_request
from allspark_workers.engine.attempt import attempt
from allspark_workers.engine.errors import ModelMemoryError
from allspark_workers.engine.facts import model_facts
from allspark_workers.engine.families import Family, Progress, SampleFamily, Tensors, make_sequence
from allspark_workers.engine.graphs import is_worth_capturing
from allspark_workers.engine.host_store import make_prefix_cache
from allspark_workers.engine.inbox import Command, Inbox, Verb
from allspark_workers.engine.kv import plan_kv
from allspark_workers.engine.memory import empty_device_cache, give_back
from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.profiler import Profiler
from allspark_workers.engine.residence import Residence
from allspark_workers.engine.runner import Result, Runner
from allspark_workers.engine.scheduler import Scheduler
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.sharing import members_of
from allspark_workers.engine.stats import Counters, engine_stat
from allspark_workers.engine.step_plan import Row
from allspark_workers.engine.threads import apply_threads
from allspark_workers.engine.types import (
    EngineRequest,
    EngineStat,
    FinishReason,
    ModelConfig,
    ModelFacts,
    StepOutput,
)
from allspark_workers.engine.warm_up import warm_up
from allspark_workers.models.loader import Model

if TYPE_CHECKING:
    from allspark_workers.parallel.leader import Leader

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching of one model on one device.

    One thread calls `step` in a loop; `submit`, `cancel`, `hold`, `resume`, `stat` and `profile` may be
    called from any. Every submitted request gets exactly one output whose `finish` is set, unless `stop`
    comes first. `profile_enabled` may be set at any time.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        clock: Callable[[], float] = time.monotonic,
        leader: Leader | None = None,
    ) -> None:
        """`leader`: `model` is rank 0's part of one on several devices, these are the other ranks."""
        self._leader = leader
        self.profile_enabled = False
        self._model = model
        self._config = config
        self._clock = clock
        self._layout = plan_kv(model, config)
        self._facts = model_facts(model, config, self._layout)
        self._inbox = Inbox()
        self._profiler = Profiler()
        self._counters = Counters()
        self._adapters = AdapterPool(model, config, self._inbox.wake, clock, leader)
        self._adapters.preload(config.lora_names)
        self._scheduler = self._new_scheduler()
        self._runner: Runner | None = None
        self._residence = Residence(model, self._layout, leader)
        self._outputs: list[StepOutput] = []
        self._families: dict[str, Family] = {}
        self._serials = itertools.count()
        # Nothing can run until a command arrives or a deadline passes: every live request is held.
        self._is_stalled = False

    @property
    def facts(self) -> ModelFacts:
        """What is known about the model; constant."""
        return self._facts

    def start(self) -> None:
        """Allocate the KV cache, warm up, capture decode steps where the device can. Blocks.

        Raises ModelMemoryError if the cache, or what a step needs besides, does not fit.
        """
        apply_threads(self._config.num_threads)
        self._scheduler = self._new_scheduler()
        self._counters = Counters()
        try:
            self._runner = self._prepare()
        except torch.OutOfMemoryError as error:
            self.stop()
            raise ModelMemoryError(
                f"{self._model.device} has no room for a step beside {self._layout.num_spans} KV spans: "
                f"{error}; give the model less KV memory, a smaller batch or a shorter max_length"
            ) from error
        except BaseException:
            self.stop()
            raise

    def _prepare(self) -> Runner:
        """A runner that has computed and captured some steps, with a cache that is empty again."""
        scheduler, cache = self._scheduler, self._residence.allocate()
        runner = Runner(self._model, cache, scheduler, self._profiler, self._adapters.table, self._leader)
        with self._adapters.warm_up() as adapter:
            warm_up(runner, scheduler, self._facts.max_length, adapter)
        if is_worth_capturing(self._model):
            runner.capture(self._facts.max_length)
        scheduler.prefix = make_prefix_cache(self._config, self._facts, scheduler.ledger, cache, self._clock)
        return runner

    def stop(self) -> None:
        """Free the KV cache and forget live requests without output; `start` may follow.

        Must not run while another thread is inside `step`.
        """
        self._runner = None
        self._residence.free()
        self._inbox.clear()
        self._adapters.forget_requests()
        self._families.clear()
        self._scheduler = self._new_scheduler()
        self._is_stalled = False
        empty_device_cache(self._model.device)

    def unload(self, threshold: int) -> None:
        """Move weight tensors of more than `threshold` bytes out of device memory; not while started.

        Adapters are dropped, and loaded again at their next use.

        Raises EngineError, and then nothing has moved: UnsupportedModelError for a model of several ranks.
        """
        if self._runner is not None or self._residence.is_unloaded:
            raise RuntimeError("unload called on an engine that is started or unloaded")
        self._residence.check_unloadable()
        self._adapters.drop()
        self._residence.unload(threshold)

    def reload(self) -> None:
        """Move the weights back. Raises EngineError, and then they are still out."""
        self._residence.reload()

    def close(self) -> None:
        """Give all memory back; the engine can do nothing any more."""
        device = self._model.device
        self.stop()
        self._residence.close()
        vars(self).clear()  # whatever it holds: weights, adapters, caches, graphs
        give_back(device)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; a newer epoch of a live id replaces the older one (which ends as STOPPED).

        Raises ValueError for a request that is impossible here, and for an id that is already live.
        """
        if self._runner is None:
            raise ValueError(f"request {request.request_id}: the model is not started")
        check_request(request, self._facts, self._model.max_length)
        if request.lora_name:
            request.adapter = self._adapters.lease(request.lora_name)
        self._inbox.submit(make_sequence(request, self._serials))

    def check_adapter(self, name: str) -> None:
        """Raise EngineError unless requests may name this adapter, as far as its files' headers tell."""
        self._adapters.check_files(name)

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
        """Whether `step` would do something now. Raises GroupError if a rank is gone."""
        if self._leader is not None:
            self._leader.check()
        if self._inbox:
            return True
        if not self._is_stalled and self._scheduler.has_work():
            return True
        wake_s = self._scheduler.next_wake_s()
        return wake_s is not None and wake_s <= self._clock()

    def wait_for_work(self, timeout: float) -> bool:
        """Block until there is work, at most `timeout` seconds; for the engine thread."""
        if self.has_work():
            return True
        self._counters.times.idle()
        wake_s = self._scheduler.next_wake_s()
        if wake_s is not None:
            timeout = min(timeout, max(0.0, wake_s - self._clock()))
        self._inbox.wait(timeout)
        return self.has_work()

    def step(self) -> list[StepOutput]:
        """Compute one step; the tokens and endings it produced."""
        if self._runner is None:
            raise RuntimeError("step called on an engine that is not started")
        is_profiled = self.profile_enabled
        self._counters.times.begin(self._clock())
        self._take_commands()
        self._expire()
        for seq, error in self._adapters.advance():
            if not seq.is_done:
                self._finish(seq, FinishReason.ERROR, message=str(error))
        with self._profiler.measure("alloc", "Schedule", is_profiled):
            plan = self._scheduler.schedule()
        for seq in plan.exhausted:
            if not seq.is_done:  # several sequences of one request may have run out
                self._finish(seq, FinishReason.CACHE_MEMORY, message=self._too_large(seq))
        if plan.exhausted:
            plan.rows = [row for row in plan.rows if not row.sequence.is_done]
        if plan.copies:
            self._runner.copy_spans(plan.copies)
        if self._scheduler.prefix is not None:
            self._scheduler.prefix.load_restored()
        if plan.rows:
            is_prefill = any(row.count > 1 for row in plan.rows)
            self._profiler.phase = "prefill" if is_prefill else "decode"
            results = attempt(self._runner, plan.rows, is_profiled, self._leader is not None)
            self._take_commands()  # a request cancelled meanwhile gets no further token
            self._commit_all(plan.rows, results)
        self._is_stalled = not (plan.rows or plan.exhausted or plan.preempted)
        outputs, self._outputs = self._outputs, []
        return outputs

    def stat(self) -> EngineStat:
        """A snapshot of the counters."""
        scheduler, layout, counters = self._scheduler, self._layout, self._counters
        weight_bytes = self._model.weight_bytes + self._adapters.nbytes
        return engine_stat(scheduler, self._inbox, layout, counters, weight_bytes, self._clock())

    def profile(self, reset: bool = True) -> str:
        """Measured time per operator (layout of GetOpProfilingInfo); empty if nothing was measured."""
        return self._profiler.text(reset)

    def check(self) -> None:
        """Raise unless pages, rows, requests and leases balance; call it while no step is running."""
        self._scheduler.check()
        self._adapters.check(self._scheduler)

    def _new_scheduler(self) -> Scheduler:
        layout, config = self._layout, self._config
        return Scheduler(
            PageLedger(layout.num_spans),
            layout.span_size,
            config.batch_limit,
            config.prefill_chunk,
            self._model.max_length,
        )

    def _take_commands(self) -> None:
        for command in self._inbox.take():
            self._is_stalled = False
            if command.sequence is not None:
                self._begin(command.sequence)
            else:
                self._obey(command)

    def _begin(self, seq: Sequence) -> None:
        family = seq.family
        for member in (seq,) if family is None else family.queued:
            self._scheduler.add(member)
            self._adapters.begin(member)
        if family is not None:
            self._families[seq.request_id] = family
        # A worker that died between its last token and the terminal record leaves a complete stream behind.
        reason = seq.finish() if seq.num_generated else None
        if reason is not None and isinstance(family, SampleFamily):
            self._advance(seq, family.settle(seq, reason))
        elif reason is not None:
            self._finish(seq, reason)

    def _obey(self, command: Command) -> None:
        family = self._families.get(command.request_id)
        alone = self._scheduler.get(command.request_id)
        queued = family.queued if family is not None else [alone] if alone is not None else []
        if not queued:
            return
        if command.verb is Verb.CANCEL:
            self._finish(queued[0], FinishReason.STOPPED)
            return
        for seq in queued:
            for member in members_of(seq):
                member.is_held = command.verb is Verb.HOLD

    def _expire(self) -> None:
        now_s = self._clock()
        for seq in self._scheduler.expired(now_s):
            if seq.is_done:
                continue  # it ended with another sequence of its request
            late_s = now_s - (seq.request.deadline_s or now_s)
            self._finish(seq, FinishReason.DEADLINE, message=f"the deadline passed {late_s:.3f} s ago")

    def _commit_all(self, rows: list[Row], results: list[Result | Exception]) -> None:
        """Take over what the step computed, except for requests that ended meanwhile."""
        generated = prefilled = cached = 0
        for row, result in zip(rows, results, strict=True):
            seq = row.sequence
            if seq.is_done:
                continue
            if isinstance(result, Exception):
                self._finish(seq, FinishReason.ERROR, message=f"{type(result).__name__}: {result}")
                continue
            self._scheduler.commit(row)
            prefilled += seq.count_prefilled()
            cached += seq.count_cached()
            if not row.samples:
                if seq.is_probe and seq.num_remaining == 0:
                    self._finish(seq, FinishReason.PROBED)
            elif seq.family is not None:
                generated += self._advance(seq, seq.family.take(seq, row.start, result))
            elif isinstance(result, int):
                generated += self._append(seq, result)
        self._counters.step(rows, generated, prefilled, cached, self._clock())

    def _append(self, seq: Sequence, token: int) -> int:
        """Add a token to its request, or end the request if there is none; the number of tokens added."""
        if token < 0:
            why, message = seq.without_token()
            self._finish(seq, why, message=message)
            return 0
        position = seq.num_generated
        seq.append(token)
        reason = seq.finish()
        if reason is None:
            self._outputs.append(StepOutput(seq.request_id, seq.request.epoch, position, [token]))
        else:
            self._finish(seq, reason, [token], position, seq.explain(reason))
        return 1

    def _advance(self, seq: Sequence, progress: Progress) -> int:
        """What a step did to a request of several sequences; the number of tokens added."""
        if progress.finish is not None:
            self._finish(seq, progress.finish, progress.tokens, progress.position, progress.message)
            return progress.num_generated
        if progress.left is not None:
            self._leave(progress.left)
        if progress.fork is not None and seq.gang is not None:
            self._scheduler.fork(seq.gang, progress.fork)
        if progress.tokens:
            position = progress.position or 0
            self._outputs.append(StepOutput(seq.request_id, seq.request.epoch, position, progress.tokens))
        return progress.num_generated

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        tokens: list[int] | None = None,
        position: int | None = None,
        message: str = "",
    ) -> None:
        """The one place where a request ends."""
        family, request, where = seq.family, seq.request, seq.num_generated
        tensors: Tensors = {}
        if family is not None:
            request, where, tensors = family.request, family.num_published(), family.tensors()
            del self._families[request.request_id]
        for member in (seq,) if family is None else family.queued:
            if not member.is_done:
                self._leave(member)
        self._inbox.ended(request.request_id, request.epoch)
        if position is not None:
            where = position
        key, epoch = request.request_id, request.epoch
        self._outputs.append(StepOutput(key, epoch, where, tokens or [], reason, message, tensors))

    def _leave(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        self._adapters.end(seq)

    def _too_large(self, seq: Sequence) -> str:
        return (
            f"{seq.length} tokens need {self._scheduler.spans_alone(seq)} KV spans, "
            f"the whole pool has {self._layout.num_spans}: use a shorter request or more KV memory"
        )
