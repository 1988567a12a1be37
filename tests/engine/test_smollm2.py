"""The demo model: greedy tokens equal transformers' own reading of the same GGUF file, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allspark import demo_model
from allspark.text.tokenizer import load_tokenizer
from allspark_workers.engine.engine import Engine
from engine_helpers import request, run_all
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

NEW = 64
# Read twice, the file would cost the test half a minute; that it says the same is asserted.
CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of motion are",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8,",
    "In 1969, the first",
    "To make bread you need",
    "The opposite of hot is",
    "SELECT name FROM",
    "Photosynthesis is the process by which",
    "My favourite colour is",
    "The mitochondria is",
    "Q: What is 7 times 8?\nA:",
    "It was a dark and stormy night;",
    "The Pythagorean theorem states that",
    "import numpy as np\n",
    "Shakespeare wrote",
    "List of planets in the solar system:\n1.",
]


@pytest.fixture(scope="module")
def path() -> Path:
    return demo_model.fetch()


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    """A transformers model from the GGUF file, without the `accelerate` package its loader asks for."""
    config = transformers.LlamaConfig(**CONFIG)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # a buffer, in no checkpoint
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    assert {key: loaded["config"][key] for key in CONFIG} == CONFIG
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.mark.slow
@torch.inference_mode()
def test_twenty_prompts_give_the_same_greedy_tokens(
    path: Path, reference: Any, make_engine: Callable[..., Engine]
) -> None:
    """Greedy by induction: given the tokens before it, each token is the reference's first maximum."""
    encode = load_tokenizer(path).encode
    prompts = {f"p{i}": encode(text) for i, text in enumerate(PROMPTS)}
    engine = make_engine(path, num_threads=2, max_length=256)
    got = run_all(engine, [request(name, ids, NEW) for name, ids in prompts.items()])
    torch.set_num_threads(1)  # waiting OpenMP threads would take the cores of whatever else runs here
    for name, ids in prompts.items():
        tokens = got.tokens[name]
        logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        assert len(tokens) == NEW
        assert tokens == logits.argmax(-1).tolist(), name
