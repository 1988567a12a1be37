"""A model on this worker: its engine, the thread that steps it, and what it says about itself."""

import logging
import threading
import time
from collections.abc import Callable

from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_workers.convert import facts_message, stat_message
from allspark_workers.engine.types import StepOutput
from allspark_workers.ports import EnginePort

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
#: Requests taken beyond the batch, so that a freed slot is filled without a round trip to the broker.
QUEUE_AHEAD = 4

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
        self.engine.start()
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

    def describe(self, model: fleet.WorkerModel) -> None:
        """Fills in capacity, statistics and facts."""
        kv_tokens = 0
        if self.is_running:
            facts = self.engine.facts
            model.capacity = self.capacity
            model.stat.CopyFrom(self.stat())
            kv_tokens = model.stat.total_span // (2 * facts.num_layers) * facts.span_size
        model.facts.CopyFrom(facts_message(self.engine.facts, kv_tokens))

    def stat(self) -> pb.AsEngineStat:
        """The engine's figures as of now."""
        return stat_message(self.name, self.engine.stat())
