"""What is asked of a fleet under faults, and what it must answer; one implementation for each engine."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from allspark.client import AsyncClient, AsyncRequest, GenerateOptions, ModelOptions
from allspark.client.calls import check_status
from allspark.client.options import Prompt, start_request_message
from allspark_proto import allspark_service_pb2 as pb

MODEL = "m"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the load. `stop_after` tokens its client stops it; 0: it runs to its end.

    With `is_inference` it wants hidden states and logits and no token.
    """

    prompt: Prompt
    options: GenerateOptions
    stop_after: int = 0
    is_inference: bool = False

    def message(self, uuid: str) -> pb.StartRequestRequest:
        """What a client sends."""
        message = start_request_message(MODEL, self.prompt, self.options, uuid)
        if self.is_inference:
            message.infer_type = pb.ModelInference
        return message

    async def submit(
        self, client: AsyncClient, uuid: str, metadata: Sequence[tuple[str, str]] = ()
    ) -> AsyncRequest:
        """Submits it; safe to repeat. Raises what `AsyncClient.submit` raises."""
        reply, trailing = await client.call("StartRequest", self.message(uuid), metadata=metadata)
        check_status("StartRequest", reply.as_status, trailing)
        return client.attach(MODEL, reply.uuid)


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a client got. `tensors`: serialised data by name, so that equal means equal in every bit."""

    tokens: list[int]
    finish_reason: str
    text: str = ""
    tensors: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, request: AsyncRequest, tokens: list[int]) -> "Answer":
        """The answer of a request that has ended."""
        progress = request.progress
        tensors = {name: t.data for name, t in progress.tensors.items() if name != "text"}
        return cls(tokens, request.finish_reason, progress.take_text(), tensors)

    def difference(self, expected: "Answer") -> str:
        """What is not as in the quiet run; empty if nothing."""
        if self.tokens != expected.tokens:
            return f"got {self.tokens}, expected {expected.tokens}"
        if self.finish_reason != expected.finish_reason:
            return f"ended with reason {self.finish_reason!r}, expected {expected.finish_reason!r}"
        if self.text != expected.text:
            return f"got the text {self.text!r}, expected {expected.text!r}"
        if self.tensors != expected.tensors:
            names = sorted(n for n in self.tensors | expected.tensors if self._differs(expected, n))
            return f"tensors {names} differ"
        return ""

    def _differs(self, expected: "Answer", name: str) -> bool:
        return self.tensors.get(name) != expected.tensors.get(name)

    def is_beginning_of(self, expected: "Answer") -> bool:
        """Whether it is what the quiet run gave first."""
        return self.tokens == expected.tokens[: len(self.tokens)] and expected.text.startswith(self.text)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What to serve and with which workers; `pace` stretches the time between faults."""

    path: Path
    roots: tuple[Path, ...]
    worker_command: tuple[str, ...] = (sys.executable, "-m", "allspark.cli", "worker")
    worker_args: tuple[str, ...] = ()
    options: ModelOptions | None = None
    pace: float = 1.0


class Workload(Protocol):
    """A source of requests whose answers are known."""

    def serve(self, root: Path) -> ServedModel:
        """Prepares the model in an empty directory."""

    async def rehearse(self, addresses: Sequence[str]) -> None:
        """The quiet run, on the fleet that is about to be disturbed."""

    def ask(self, index: int) -> Ask:
        """The load's request of this number: a function of the seed and the number."""

    def expected(self, asked: Ask) -> Answer:
        """What the quiet run gave, for a request that runs to its end."""
