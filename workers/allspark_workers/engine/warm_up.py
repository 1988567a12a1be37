"""The first steps of an engine: they compile kernels, start threads and touch the weights."""

from __future__ import annotations

import numpy as np

from allspark_workers.engine.runner import Runner
from allspark_workers.engine.scheduler import Scheduler
from allspark_workers.engine.sequence import Sequence
from allspark_workers.engine.types import AdapterLease, EngineRequest, GenerationParams

_STEPS = 3
# More rows than the kernels for few of them take, so that those for many are compiled too.
_TOKENS = 96


def warm_up(runner: Runner, scheduler: Scheduler, max_length: int, adapter: AdapterLease | None) -> None:
    """Run one request for a few steps, with `adapter` if the engine has any. Nothing of it is counted."""
    length = max(1, min(_TOKENS, max_length - _STEPS))
    params = GenerationParams(
        max_length=length + _STEPS, do_sample=True, top_k=20, top_p=0.9, repetition_penalty=1.1
    )
    request = EngineRequest("warm-up", 0, np.zeros(length, np.int64), params, adapter=adapter)
    seq = Sequence(request, 0)
    scheduler.add(seq)
    for _ in range(_STEPS):
        rows = scheduler.schedule().rows
        tokens = runner.run(rows)
        for row in rows:
            scheduler.commit(row)
        for token in tokens:
            if isinstance(token, int):
                seq.append(token)
    scheduler.remove(seq)
    runner.try_sampling()
