"""Breadth: thousands of short requests to the scripted engine, whose tokens are known beforehand."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from allspark.client import GenerateOptions

from tests.chaos.workload import Answer, Ask, ServedModel
from tests.fleet.scripted_engine import expected_tokens

SCRIPTED = str(Path(__file__).parents[1] / "fleet" / "scripted_engine.py")


def ask(seed: int, index: int) -> Ask:
    """The request of this number."""
    rng = random.Random(f"{seed}/{index}")
    prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(1, 40))]
    num_tokens = rng.randint(1, 60)
    stop_after = rng.randint(1, num_tokens) if rng.random() < 0.1 else 0
    options = GenerateOptions(max_new_tokens=num_tokens, seed=rng.randrange(1 << 31))
    return Ask(prompt, options, stop_after)


class ScriptedWorkload:
    """Needs no quiet run: the engine's tokens are a function of prompt, seed and position."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def serve(self, root: Path) -> ServedModel:
        path = root / "m.json"
        path.write_text('{"max_length": 512, "max_batch": 8, "step_s": 0.01}')
        return ServedModel(path, (root,), (sys.executable, SCRIPTED))

    async def rehearse(self, addresses: Sequence[str]) -> None:
        """There is nothing to rehearse."""

    def ask(self, index: int) -> Ask:
        return ask(self._seed, index)

    def expected(self, asked: Ask) -> Answer:
        prompt = [int(token) for token in asked.prompt]  # type: ignore[arg-type] # these prompts are ids
        count = asked.options.max_new_tokens or 0
        return Answer(expected_tokens(prompt, count, seed=asked.options.seed), "length")
