"""What the worker process needs of an engine: the real one and the scripted one of the tests have it."""

from collections.abc import Callable
from typing import Protocol

from allspark_workers.engine.types import EngineRequest, EngineStat, ModelConfig, ModelFacts, StepOutput

Progress = Callable[[float, str], None]


class EnginePort(Protocol):
    """One loaded model. `submit`, `cancel`, `hold` and `resume` may be called from any thread.

    `profile_enabled`: whether steps measure their operators for `profile`; may be set at any time.
    """

    profile_enabled: bool

    @property
    def facts(self) -> ModelFacts: ...

    def start(self) -> None:
        """Allocates the KV pool and warms up."""

    def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises ValueError for one that is impossible."""

    def check_adapter(self, name: str) -> None:
        """Raises EngineError unless requests may name this adapter. May be called from any thread."""

    def cancel(self, request_id: str) -> None:
        """Ends a request within the step; its last output has finish STOPPED."""

    def hold(self, request_id: str) -> None:
        """Pauses a request without losing its state."""

    def resume(self, request_id: str) -> None:
        """Goes on with a held request."""

    def has_work(self) -> bool: ...

    def wait_for_work(self, timeout: float) -> bool:
        """Blocks until there is work, or for `timeout` seconds."""

    def step(self) -> list[StepOutput]:
        """Computes one step; only the engine thread calls it."""

    def stat(self) -> EngineStat: ...

    def profile(self, reset: bool = True) -> str: ...

    def stop(self) -> None:
        """Frees the KV pool; `start` may follow."""

    def unload(self, threshold: int) -> None:
        """Moves weight tensors of more than `threshold` bytes out of device memory; not while started.

        Raises EngineError, and then nothing has moved; UnsupportedModelError: they cannot move one by one.
        """

    def reload(self) -> None:
        """Moves them back. Raises EngineError, and then they are still out."""

    def close(self) -> None:
        """Gives all memory back; nothing may be called afterwards."""


#: Loads a model; raises EngineError.
LoadEngine = Callable[[ModelConfig, Progress], EnginePort]
