"""A model on this worker: its engine, the thread that steps it, and what it says about itself."""

import logging
import threading
import time
from collections.abc import Callable

from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_workers.convert import facts_message, progress_message, stat_message
from allspark_workers.engine.types import EngineStat, StepOutput
from allspark_workers.ports import EnginePort

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.1  # bounds how long stopping an idle model takes
#: Requests taken beyond the batch, so that a freed slot is filled without a round trip to the broker.
QUEUE_AHEAD = 4

#: Since StartModel: an Unload and a Reload in between do not set them back.
COUNTERS = (
    "total_generated_token",
    "total_prefill_token",
    "prefix_cache_hit_token",
    "prefix_cache_miss_token",
)

Emit = Callable[[str, list[StepOutput]], None]


class HostedModel:
    """`emit(model, outputs)` is called on the engine thread after each step that produced something."""

    def __init__(
        self, name: str, engine: EnginePort, emit: Emit, on_crash: Callable[[str, BaseException], None]
    ):
        self.name = name
        self.engine = engine
        self._emit = emit
        self._on_crash = on_crash
        self._thread: threading.Thread | None = None
        self._leave = threading.Event()
        self._busy_since = 0.0
        self._has_run = False
        self._before = pb.AsEngineStat()  # its counters of before an Unload, if it runs again since a Reload
        self._resumes = False
        self.is_unloaded = False

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    @property
    def is_idle(self) -> bool:
        """Running, and the engine says that it has nothing to do."""
        return self._thread is not None and not self._busy_since

    @property
    def capacity(self) -> int:
        """Requests this worker takes at once."""
        return self.engine.facts.max_batch + QUEUE_AHEAD

    def start(self) -> None:
        """Allocates KV, warms up and begins stepping; blocks until ready."""
        before = self._counted(self.engine.stat()) if self._resumes else pb.AsEngineStat()
        self._has_run = self._resumes = False  # no figures until it runs
        self.engine.start()
        self._before = before
        self._has_run = True
        self._leave.clear()
        self._thread = threading.Thread(target=self._loop, name=f"engine-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends stepping and frees KV; blocks until the step in progress is over."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._leave.set()
            thread.join()
            self.engine.stop()

    def unload(self, threshold: int, *, resumes: bool) -> None:
        """Ends stepping and moves weight tensors of more than `threshold` bytes out of device memory.

        `resumes`: it will run again once it is reloaded, and its counters go on.
        """
        self.stop()
        self._resumes = resumes
        if not self.is_unloaded:
            self.engine.unload(threshold)
            self.is_unloaded = True

    def reload(self) -> None:
        """Moves the weights back."""
        if self.is_unloaded:
            self.engine.reload()
            self.is_unloaded = False

    def close(self) -> None:
        """Ends stepping and gives all memory back."""
        self.stop()
        self.engine.close()

    def _loop(self) -> None:
        try:
            while not self._leave.is_set():
                if not self.engine.has_work():
                    self._busy_since = 0.0
                    self.engine.wait_for_work(IDLE_WAIT_S)
                    continue
                self._busy_since = self._busy_since or time.monotonic()
                outputs = self.engine.step()
                if outputs:
                    self._emit(self.name, outputs)
        except BaseException as e:
            log.exception("the engine of model %r failed", self.name)
            self._on_crash(self.name, e)

    def seconds_since_step(self) -> float:
        """How long the engine has had work without finishing a step; 0 when idle."""
        if self._thread is None or not self._busy_since:
            return 0.0
        return max(0.0, time.monotonic() - max(self._busy_since, self.engine.stat().last_step_s))

    @property
    def has_figures(self) -> bool:
        """Whether there is something to tell: a stopped model keeps its last figures."""
        return self._has_run and not self.is_unloaded

    def describe(self, model: fleet.WorkerModel) -> None:
        """Fills in capacity, statistics, progress and facts."""
        kv_tokens = 0
        if self.has_figures:
            stat = self.engine.stat()
            model.stat.CopyFrom(self._counted(stat))
            model.engine.CopyFrom(progress_message(stat))
        if self.is_running:
            facts = self.engine.facts
            model.capacity = self.capacity
            kv_tokens = model.stat.total_span // (2 * facts.num_layers) * facts.span_size
        model.facts.CopyFrom(facts_message(self.engine.facts, kv_tokens))

    def stat(self) -> pb.AsEngineStat:
        """The engine's figures as of now."""
        return self._counted(self.engine.stat())

    def _counted(self, stat: EngineStat) -> pb.AsEngineStat:
        """With what was counted between StartModel and an Unload."""
        message = stat_message(self.name, stat)
        for name in COUNTERS:
            setattr(message, name, getattr(message, name) + getattr(self._before, name))
        return message
