"""Write tiny GGUF files from transformers models, the way the public converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from half-split to neighbour-paired order, as for the architecture "llama"."""
    dim = weight.shape[0] // heads
    order = np.arange(dim).reshape(2, dim // 2).T.ravel()
    rows = (np.arange(heads)[:, None] * dim + order).ravel()
    return np.ascontiguousarray(weight[rows])


def write_gguf(path: Path, model: Any, arch: str, kind: Kind, extra: dict[str, Any] | None = None) -> None:
    """Store `model` as `arch`, matrices as `kind`; put the rounded matrices back into `model`."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(getattr(config, "head_dim", 16))
    writer.add_eos_token_id(2)
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    for name, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{name}", value)
        else:
            writer.add_float32(f"{arch}.{name}", value)
    for name, parameter in model.named_parameters():
        _add(writer, name, parameter, arch, kind, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(
    writer: gguf.GGUFWriter, name: str, parameter: torch.nn.Parameter, arch: str, kind: Kind, config: Any
) -> None:
    values = parameter.detach().numpy()
    if values.ndim == 2:
        stored = gguf.quants.quantize(values, kind)
        values = gguf.quants.dequantize(stored, kind)
        parameter.data.copy_(torch.from_numpy(values.copy()))
    else:
        kind = Kind.F32
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        values = interleave(values, heads)
    raw = gguf.quants.quantize(values, kind)
    writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
