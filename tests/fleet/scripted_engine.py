"""An engine without a model: tokens are a pure function of (prompt, seed, position), as the real one's are.

Run as a program it is a worker process: `python scripted_engine.py <flags of allspark worker>`. The model
file is JSON: {"vocab": 1000, "max_length": 512, "max_batch": 8, "step_s": 0.0, "fail": "", "poison": [ids]}.
A request whose prompt starts with an id of "poison" kills the process at its second step, one of
"freeze_once" freezes the engine there (once for a model file), one of "overlooked" is never begun. Adapters
"unreadable", "large" and "unsupported" are bad in the way they say, "missing" and those with a file NAME.gone
are not there. While the file "gate" is missing, no request gets more than "gate_at" tokens (0).
"""

import json
import logging
import os
import sys
import threading
import time
import zlib
from pathlib import Path

from allspark_workers.engine.errors import (
    AdapterLimitError,
    AdapterNotFoundError,
    ModelIOError,
    ModelMemoryError,
    UnsupportedModelError,
)
from allspark_workers.engine.step_times import StepTimes
from allspark_workers.engine.types import (
    EngineRequest,
    EngineStat,
    FinishReason,
    ModelConfig,
    ModelFacts,
    StepOutput,
)
from allspark_workers.main import main
from allspark_workers.ports import Progress
from allspark_workers.settings import WorkerSettings

SPAN = 16


def expected_tokens(
    prompt: list[int], count: int, vocab: int = 1000, seed: int = 0, lora: str = ""
) -> list[int]:
    """What the scripted engine generates; ids are never 0, so eos 0 does not end a request by chance."""
    base = zlib.crc32(b",".join(b"%d" % t for t in prompt)) ^ (seed & 0xFFFFFFFF) ^ zlib.crc32(lora.encode())
    return [1 + zlib.crc32(b"%d:%d" % (base, i)) % (vocab - 1) for i in range(count)]


class _Running:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.generated = list(request.generated)
        self.held = False
        self.cancelled = False
        total = request.params.max_length - len(request.prompt)
        self.plan = expected_tokens(
            request.prompt.tolist(), total, seed=request.params.seed, lora=request.lora_name
        )

    def is_over(self) -> bool:
        """Whether it ends without another token."""
        deadline_s = self.request.deadline_s
        return self.cancelled or (deadline_s is not None and time.monotonic() >= deadline_s)


class ScriptedEngine:
    """One token a step for up to max_batch requests."""

    def __init__(self, config: ModelConfig, options: dict) -> None:  # type: ignore[type-arg]
        self.options = options
        self.path = config.model_path
        max_length = config.max_length or options.get("max_length", 512)
        self.facts = ModelFacts(
            "scripted",
            options.get("vocab", 1000),
            max_length,
            config.max_batch or options.get("max_batch", 8),
            2,
            1,
            1,
            16,
            SPAN,
            SPAN * 32,
            (0,),
            "fp32",
            config.device,
            0,
            "scripted",
            tokenizer_paths=tuple(options.get("tokenizer", ())),
        )
        self._lock = threading.Condition()
        self._requests: dict[str, _Running] = {}
        self._steps = 0
        self._generated = 0
        self._times = StepTimes()
        self._last_step_s = 0.0
        self._poisoned = 0
        for name in config.lora_names:
            self.check_adapter(name)

    def start(self) -> None:
        if self.options.get("fail") == "start":
            raise ModelMemoryError("the scripted engine was told to fail at start")

    def stop(self) -> None:
        self._requests.clear()

    def unload(self, threshold: int) -> None:
        if self.options.get("fail") == "unload":
            raise ModelIOError("the scripted engine was told to fail at unload")

    def reload(self) -> None:
        if self.options.get("fail") == "reload":
            raise ModelMemoryError("the scripted engine was told to fail at reload")

    def close(self) -> None:
        assert not self._requests

    def submit(self, request: EngineRequest) -> None:
        with self._lock:
            self._requests[request.request_id] = _Running(request)
            self._lock.notify_all()

    def check_adapter(self, name: str) -> None:
        if name == "missing" or (Path(self.path).parent / f"{name}.gone").exists():
            raise AdapterNotFoundError(f"no adapter {name!r}")
        if name == "unreadable":
            raise ModelIOError(f"{name} cannot be read")
        if name == "large":
            raise AdapterLimitError("rank 100, the limit is 64")
        if name == "unsupported":
            raise UnsupportedModelError("use_dora is not supported")

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._requests:
                self._requests[request_id].cancelled = True
            self._lock.notify_all()

    def hold(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._requests:
                self._requests[request_id].held = True

    def resume(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._requests:
                self._requests[request_id].held = False
            self._lock.notify_all()

    def _active(self) -> list[_Running]:
        overlooked = self.options.get("overlooked", [])
        runnable = [
            r
            for r in self._requests.values()
            if r.cancelled or not (r.held or int(r.request.prompt[0]) in overlooked)
        ]
        batch = runnable[: self.facts.max_batch]
        if (gate := self.options.get("gate")) and not Path(gate).exists():
            limit = self.options.get("gate_at", 0)
            over = [r for r in runnable if r.is_over()]
            batch = over + [r for r in batch if not r.is_over() and len(r.generated) < limit]
        return batch[: self.facts.max_batch]

    def has_work(self) -> bool:
        with self._lock:
            return bool(self._active())

    def wait_for_work(self, timeout: float) -> bool:
        with self._lock:
            if not self._active():
                self._times.idle()
            return self._lock.wait_for(lambda: bool(self._active()), timeout)

    def step(self) -> list[StepOutput]:
        self._times.begin(time.monotonic())
        if delay := self.options.get("step_s", 0.0):
            time.sleep(delay)  # the time a real step takes
        with self._lock:
            begun = [int(r.request.prompt[0]) for r in self._active() if r.generated]
        if set(begun) & set(self.options.get("freeze_once", [])):
            self._freeze_once()  # not with the lock: what asks for figures goes on, as with a real engine
        with self._lock:
            outputs = [self._advance(r) for r in self._active()]
            for o in outputs:
                if o.finish is not None:
                    del self._requests[o.request_id]
            self._steps += 1
            self._generated += sum(len(o.tokens) for o in outputs)
            self._last_step_s = time.monotonic()
            self._times.step(sum(bool(o.tokens) for o in outputs), 0, 0, self._last_step_s)
        return outputs

    def _advance(self, r: _Running) -> StepOutput:
        request, position = r.request, len(r.generated)
        if r.cancelled:
            return StepOutput(request.request_id, request.epoch, position, [], FinishReason.STOPPED)
        if request.deadline_s is not None and time.monotonic() >= request.deadline_s:
            return StepOutput(
                request.request_id, request.epoch, position, [], FinishReason.DEADLINE, "its deadline passed"
            )
        if position and int(request.prompt[0]) in self.options.get("poison", []):
            os._exit(9)
        token = r.plan[position]
        r.generated.append(token)
        finish = None
        if len(request.prompt) + len(r.generated) >= request.params.max_length:
            finish = FinishReason.LENGTH
        elif request.params.early_stopping and token == request.params.eos_token_id:
            finish = FinishReason.EOS
        return StepOutput(request.request_id, request.epoch, position, [token], finish)

    def _freeze_once(self) -> None:
        marker = Path(f"{self.path}.frozen")
        if not marker.exists():
            marker.touch()
            threading.Event().wait()

    def stat(self) -> EngineStat:
        with self._lock:
            live = list(self._requests.values())
        used = 4 * len(live)
        return EngineStat(
            4096, used, 4096 - used, (4096 - used) // 4 * SPAN, SPAN * 32,
            0, len(live), 0, 0, self._generated, 0, 0.0, 0.0,
            steps=self._steps, last_step_s=self._last_step_s,
            full_step_s=self._times.step_s(self.facts.max_batch),
            next_step_s=self._times.step_s(min(self.facts.max_batch, len(live) + 1)),
            output_left=sum(len(r.plan) - len(r.generated) for r in live),
        )  # fmt: skip

    def profile(self, reset: bool = True) -> str:
        return f"steps {self._steps}\n"

    def check(self) -> None:
        assert not self._requests


WORKER_NAME = ""


def _mine(options: dict, key: str, default: object):  # type: ignore[no-untyped-def, type-arg]
    """An option, or what "<option>_of" says for the worker of this name."""
    return options.get(f"{key}_of", {}).get(WORKER_NAME, options.get(key, default))


def _take_time(seconds: float, progress: Progress) -> None:
    """As a real load does: bit by bit, with a report after each."""
    end = time.monotonic() + seconds
    progress(0.5, "reading")
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))
        progress(0.5, "reading")


def load(config: ModelConfig, progress: Progress) -> ScriptedEngine:
    try:
        options = json.loads(Path(config.model_path).read_text())
    except (OSError, ValueError) as e:
        raise ModelIOError(f"{config.model_path} is no scripted model: {e}") from e
    if log := options.get("log"):
        with Path(log).open("a") as file:
            file.write("load\n")
    _take_time(_mine(options, "load_s", 0.0), progress)
    if _mine(options, "fail", "") == "load":
        raise ModelMemoryError("the scripted engine was told to fail at load")
    return ScriptedEngine(config, options)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    settings = WorkerSettings.load(sys.argv[1:])
    WORKER_NAME = settings.name
    sys.exit(main(settings, load))
