"""A model whose memory shows: some 70 MB of weights, so that what a process holds can be told from noise."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import transformers

EMBEDDING_BYTES = 24_000 * 512 * 2
CONFIG = {
    "vocab_size": 24_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def write_medium_model(path: Path) -> Path:
    """Random weights in bf16, the same every time."""
    torch.manual_seed(20240611)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return path


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process in physical pages, mapped files included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
