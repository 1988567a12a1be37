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
    output projection too if `has_output_bias`. `windows`: which layers a configured window belongs to, unless
    it names their types: "all", those from `max_window_layers` on ("late"), every second one before
    ("alternate_early"), all but every n-th ("pattern"), "none": it is not read; `has_window_switch`: only if
    `use_sliding_window` is set. `query_pre_attn_scalar` None: scores are divided by sqrt(head_dim).
    `rotary_fraction`, `rope_theta`, `window`, `norm_eps`, `max_positions`, the scalar and the caps: what the
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
    has_window_switch: bool = False
    window: int | None = None
    window_pattern: int = 1
    rotary_fraction: float = 1.0
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    is_rope_interleaved: bool = False
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    scales_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    has_experts: bool = False
    has_shared_expert: bool = False


_FUSED: Final = TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
_GLM: Final = TensorNames(gate_up=("gate_up_proj",))
_GLM4: Final = TensorNames(
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    gate_up=("gate_up_proj",),
)

_GEMMA: Final = TensorNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
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
        Family("qwen2", "Qwen2ForCausalLM", 32768, has_qkv_bias=True, windows="late", has_window_switch=True),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            32768,
            bias_key="attention_bias",
            has_output_bias=True,
            has_qk_norm=True,
            windows="late",
            has_window_switch=True,
        ),
        Family("phi3", "Phi3ForCausalLM", 4096, names=_FUSED, windows="all", norm_eps=1e-5),
        Family(
            "glm",
            "GlmForCausalLM",
            131072,
            names=_GLM,
            bias_key="attention_bias",
            has_qkv_bias=True,
            rotary_fraction=0.5,
            norm_eps=1.5625e-7,
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
            norm_eps=1.5625e-7,
            is_rope_interleaved=True,
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            8192,
            names=_GEMMA,
            bias_key="attention_bias",
            has_output_bias=True,
            activation="gelu_tanh",
            windows="pattern",
            window=4096,
            window_pattern=2,
            norm_offset=1.0,
            scales_embeddings=True,
            query_pre_attn_scalar=256,
            attention_soft_cap=50.0,
            final_soft_cap=30.0,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            131072,
            names=_GEMMA,
            bias_key="attention_bias",
            has_output_bias=True,
            has_qk_norm=True,
            activation="gelu_tanh",
            windows="pattern",
            window=4096,
            window_pattern=6,
            rope_theta=1e6,
            local_rope_theta=1e4,
            norm_offset=1.0,
            scales_embeddings=True,
            query_pre_attn_scalar=256,
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            32768,
            bias_key="qkv_bias",
            has_qkv_bias=True,
            windows="alternate_early",
            has_window_switch=True,
            window=4096,
            has_experts=True,
            has_shared_expert=True,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            32768,
            bias_key="attention_bias",
            has_output_bias=True,
            has_qk_norm=True,
            windows="all",
            has_window_switch=True,
            window=4096,
            has_experts=True,
        ),
    )
}


def known_classes() -> str:
    """The architectures as configurations spell them, for messages."""
    return ", ".join(family.hf_class for family in FAMILIES.values())


def find_family(name: str) -> Family | None:
    """By class (`LlamaForCausalLM`) or model type (`llama`)."""
    return next((f for f in FAMILIES.values() if name in (f.hf_class, f.name)), None)
