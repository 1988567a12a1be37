"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.types import EngineRequest, GenerationParams

SequenceMaker = Callable[..., Sequence]


@pytest.fixture
def make_sequence() -> SequenceMaker:
    """Make sequences with increasing serial numbers; keywords of GenerationParams pass through."""
    counter = iter(range(1_000_000))

    def make(
        prompt: list[int] | int = 4,
        *,
        name: str = "",
        generated: list[int] | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
        **params: object,
    ) -> Sequence:
        serial = next(counter)
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        params.setdefault("max_length", 10_000)
        request = EngineRequest(
            request_id=name or f"r{serial}",
            epoch=1,
            prompt=np.asarray(tokens, np.int64),
            params=GenerationParams(**params),  # type: ignore[arg-type]
            generated=generated or [],
            priority=priority,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
        )
        return Sequence(request, serial)

    return make
