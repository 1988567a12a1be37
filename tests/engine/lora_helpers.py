"""Random PEFT adapters of tiny models, by peft itself; peft's merged models; a driver of an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import EngineRequest
from engine_helpers import Collected, TinyModels, random_prompt, request
from peft import LoraConfig, PeftModel, get_peft_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# What an adapter may look like; each differs in rank, scaling and in the modules it reaches.
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "stable": {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": EVERYTHING},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": "all-linear",
        "rank_pattern": {"k_proj": 16, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"down_proj": 9, "o_proj": 1},
    },
    "regex": {"r": 32, "lora_alpha": 8, "target_modules": r".*\.(up|k)_proj"},
    "layers": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["o_proj", "down_proj", "q_proj"],
        "exclude_modules": ["q_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
}


def write_adapter(tiny: TinyModels, variant: str, name: str, where: Path, **changes: Any) -> Path:
    """The adapter of that name with random weights (B too) in a directory of its own, saved by peft."""
    torch.manual_seed(sum(map(ord, variant + name)))
    config = LoraConfig(task_type="CAUSAL_LM", **(ADAPTERS[name] | changes))
    model = get_peft_model(copy.deepcopy(tiny.reference(variant)), config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(where / name)
    return where / name


def merged(tiny: TinyModels, variant: str, directory: Path) -> Any:
    """The transformers model with the adapter merged into its weights by peft."""
    model = PeftModel.from_pretrained(copy.deepcopy(tiny.reference(variant)), directory)
    return model.merge_and_unload().eval()


def run_until_idle(engine: Engine, requests: list[EngineRequest]) -> Collected:
    """As `run_all`, but waits for adapters that are being loaded."""
    collected = Collected()
    for item in requests:
        engine.submit(item)
    while len(collected.ends) < len(requests):
        assert engine.wait_for_work(20.0), "nothing to do, but requests are open"
        collected.add(engine.step())
    engine.check()
    return collected


NAMES = ("plain", "stable", "layers")


class Driver:
    """Steps an engine until something has happened."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.got = Collected()

    def submit(self, key: str, lora_name: str, new_tokens: int = 4, **fields: Any) -> None:
        fields.setdefault("prompt", random_prompt(7))
        self.engine.submit(request(key, fields.pop("prompt"), new_tokens, lora_name=lora_name, **fields))

    def step(self) -> None:
        assert self.engine.wait_for_work(20.0), "the engine has nothing to do"
        self.got.add(self.engine.step())

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            self.step()
        raise AssertionError("it did not happen in 2000 steps")

    def until_end(self, *keys: str) -> None:
        self.until(lambda: all(key in self.got.ends for key in keys))
        self.engine.check()

    def leases(self) -> dict[str, int]:
        pool = self.engine._adapters
        return {name: count for name in NAMES if (count := pool.num_leases(name))}
