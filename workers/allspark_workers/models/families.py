"""The model families: how their checkpoints name tensors and what their configurations leave unsaid.

A family is a row of this table. Everything a family computes is an option of Architecture, so the decoder
knows none of them by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from allspark_workers.models.architecture import Activation


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names inside a layer. Norms applied to what a block gives back are None where a family has none."""

    input_norm: str = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """One family as Hugging Face configurations describe it.

    `bias_key`: the configuration's key for biases of q, k and v (None: `has_qkv_bias` always holds), of the
    output projection too if `has_output_bias`. `windows`: which layers a configured window belongs to
    ("none": a window is not read). `rotary_fraction`, `rope_theta`, `window`, `max_positions`: what the
    reference implementation assumes where a configuration is silent.
    """

    name: str
    hf_class: str
    max_positions: int
    names: TensorNames = TensorNames()
    bias_key: str | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias_key: bool = False
    has_qk_norm: bool = False
    activation: Activation = "silu"
    windows: str = "none"
    window: int | None = None
    rotary_fraction: float = 1.0
    rope_theta: float = 10000.0
    is_rope_interleaved: bool = False


_FUSED: Final = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
_GLM: Final = TensorNames(gate_up=("gate_up_proj",))
_GLM4: Final = TensorNames(
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate_up=("gate_up_proj",),
)

FAMILIES: Final = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            2048,
            bias_key="attention_bias",
            has_output_bias=True,
            has_mlp_bias_key=True,
        ),
        Family("mistral", "MistralForCausalLM", 131072, windows="all", window=4096),
        Family("qwen2", "Qwen2ForCausalLM", 32768, has_qkv_bias=True, windows="late"),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            32768,
            bias_key="attention_bias",
            has_output_bias=True,
            has_qk_norm=True,
            windows="late",
        ),
        Family("phi3", "Phi3ForCausalLM", 4096, names=_FUSED, windows="all"),
        Family(
            "glm",
            "GlmForCausalLM",
            131072,
            names=_GLM,
            bias_key="attention_bias",
            has_qkv_bias=True,
            rotary_fraction=0.5,
            is_rope_interleaved=True,
        ),
        Family(
            "glm4",
            "Glm4ForCausalLM",
            131072,
            names=_GLM4,
            bias_key="attention_bias",
            has_qkv_bias=True,
            rotary_fraction=0.5,
            is_rope_interleaved=True,
        ),
    )
}


def known_classes() -> str:
    """The architectures as configurations spell them, for messages."""
    return ", ".join(family.hf_class for family in FAMILIES.values())


def find_family(name: str) -> Family | None:
    """By class (`LlamaForCausalLM`) or model type (`llama`)."""
    return next((f for f in FAMILIES.values() if name in (f.hf_class, f.name)), None)
