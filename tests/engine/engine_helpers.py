"""Tiny models of every family, requests, and a record of what an engine emits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import EngineRequest, GenerationParams, StepOutput

VOCAB = 131
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 160,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "pad_token_id": 0}
MOE = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
# name -> (configuration class, what differs from COMMON)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR_ROPE, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": 70}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "phi3": (
        "Phi3",
        {
            "sliding_window": 90,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            "pad_token_id": 0,
        },
    ),
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0, "sliding_window": 60},
    ),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "sliding_window": 45,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        MOE
        | {"shared_expert_intermediate_size": 96, "mlp_only_layers": [2], "num_hidden_layers": 4}
        | {"use_sliding_window": True, "sliding_window": 80, "max_window_layers": 3},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        MOE | {"head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 32, "attention_bias": False, "pad_token_id": 0}),
}


def build_reference(variant: str, **more: Any) -> Any:
    """A transformers model whose every parameter is random, biases and norms included."""
    family, changes = VARIANTS[variant]
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**(COMMON | changes | more))
    torch.manual_seed(sum(map(ord, variant)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(0.0 if family.startswith("Gemma") else 1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    model.generation_config.eos_token_id = None
    return model


class TinyModels:
    """Reference models and their directories, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, Any] = {}

    def reference(self, variant: str) -> Any:
        """The transformers model."""
        if variant not in self._models:
            model = build_reference(variant)
            # Small shards: every checkpoint is read through an index.
            model.save_pretrained(self._root / variant, max_shard_size="60KB")
            self._models[variant] = model
        return self._models[variant]

    def path(self, variant: str) -> Path:
        """The directory it was saved to."""
        self.reference(variant)
        return self._root / variant


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids above the special ones."""
    return np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist()


def request(
    name: str, prompt: list[int], new_tokens: int = 8, *, epoch: int = 1, **fields: Any
) -> EngineRequest:
    """A request; fields of GenerationParams and of EngineRequest may be mixed."""
    own = {k: fields.pop(k) for k in _OWN if k in fields}
    fields.setdefault("max_length", len(prompt) + new_tokens)
    return EngineRequest(name, epoch, np.asarray(prompt, np.int64), GenerationParams(**fields), **own)


_OWN = ("generated", "priority", "tenant", "arrival_s", "deadline_s", "lora_name")


class Collected:
    """Everything an engine emitted, per request, checked for order and for exactly one end."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, StepOutput] = {}
        self._next: dict[str, int] = {}

    def add(self, outputs: list[StepOutput]) -> None:
        for out in outputs:
            key = out.request_id
            assert key not in self.ends, f"{key} goes on after its end"
            assert self._next.setdefault(key, out.position) == out.position
            self._next[key] += len(out.tokens)
            self.tokens.setdefault(key, []).extend(out.tokens)
            if out.finish is not None:
                self.ends[key] = out

    def finish(self, key: str) -> str:
        """Why the request ended."""
        reason = self.ends[key].finish
        assert reason is not None
        return str(reason)


def run_all(engine: Engine, requests: list[EngineRequest], limit: int = 5000) -> Collected:
    """Submit everything and step until nothing is left to do."""
    collected = Collected()
    for item in requests:
        engine.submit(item)
    for _ in range(limit):
        if not engine.has_work():
            break
        collected.add(engine.step())
    else:
        raise AssertionError(f"still working after {limit} steps")
    engine.check()
    return collected
