"""How GGUF files of each architecture name their tensors, and which family they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from allspark_workers.engine.errors import ModelIOError
from allspark_workers.models.families import FAMILIES, Family
from allspark_workers.models.gguf_header import TensorInfo

# Mistral files say "llama".
ARCHITECTURES: Final = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "glm4": "glm4",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# All experts of a layer in one tensor [experts, rows, columns].
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_BLOCK_NAME: Final = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


def family_of(architecture: object) -> Family | None:
    """The family of `general.architecture`; None if it is not known."""
    return FAMILIES.get(ARCHITECTURES.get(str(architecture), ""))


def hugging_face_tensors(
    tensors: Mapping[str, TensorInfo], family: Family
) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors of known parts of a model under the names of the family's checkpoints.

    Raises ModelIOError for experts that are no stack of matrices.
    """
    names = family.names
    block = dict(_BLOCK)
    block["ffn_norm"] = names.mlp_norm
    if names.attention_post_norm is not None and names.mlp_post_norm is not None:
        block["post_attention_norm"] = names.attention_post_norm
        block["post_ffw_norm"] = names.mlp_post_norm
    if len(names.gate_up) == 1:
        block["ffn_up"] = f"mlp.{names.gate_up[0]}"
    for name, tensor in tensors.items():
        match = _BLOCK_NAME.fullmatch(name)
        if name in _TOP:
            yield _TOP[name], tensor
        elif match is not None and match[2] in _EXPERTS:
            prefix = f"model.layers.{match[1]}.mlp.experts"
            for index, expert in enumerate(_split(tensor)):
                yield f"{prefix}.{index}.{_EXPERTS[match[2]]}.{match[3]}", expert
        elif match is not None and match[2] in block:
            yield f"model.layers.{match[1]}.{block[match[2]]}.{match[3]}", tensor


def _split(tensor: TensorInfo) -> Iterator[TensorInfo]:
    if len(tensor.shape) != 3:
        raise ModelIOError(f"tensor {tensor.name} has shape {tensor.shape}, not [experts, rows, columns]")
    count, rows = tensor.shape[0], tensor.data.shape[0] // tensor.shape[0]
    for index in range(count):
        part = tensor.data[index * rows : (index + 1) * rows]
        yield replace(tensor, shape=tensor.shape[1:], data=part)
