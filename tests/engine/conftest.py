"""Fixtures of the engine's tests: sequences, tiny models, engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from allspark_workers.engine.engine import Engine
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.loader import load_model
from engine_helpers import TinyModels, request

# Tiny matrices on shared cores: a second thread only waits.
torch.set_num_threads(1)

SequenceMaker = Callable[..., Sequence]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_engine(tiny: TinyModels) -> Iterator[Callable[..., Engine]]:
    """Make started engines; each is checked for a balanced ledger and stopped at the end."""
    engines: list[Engine] = []

    def make(variant: str | Path = "llama-tied", *, clock: Any = None, **config: Any) -> Engine:
        path = tiny.path(variant) if isinstance(variant, str) else variant
        settings = ModelConfig(str(path), **({"num_threads": 1, "dtype": "fp32"} | config))
        model = load_model(settings)
        engine = Engine(model, settings, clock) if clock is not None else Engine(model, settings)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.check()
        engine.stop()


@pytest.fixture
def make_sequence() -> SequenceMaker:
    """Make sequences with increasing serial numbers; keywords of GenerationParams pass through."""
    counter = iter(range(1_000_000))

    def make(prompt: list[int] | int = 4, *, name: str = "", **fields: Any) -> Sequence:
        serial = next(counter)
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        fields.setdefault("max_length", 10_000)
        return Sequence(request(name or f"r{serial}", tokens, **fields), serial)

    return make
