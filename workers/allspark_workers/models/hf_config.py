"""Read a Hugging Face `config.json` (and `generation_config.json`) into an Architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allspark_workers.engine.errors import ModelIOError, UnsupportedModelError
from allspark_workers.models.architecture import FAMILIES, ROPE_TYPES, Architecture, RopeParams

_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# What the reference implementation assumes where a configuration is silent.
_MISTRAL_WINDOW = 4096
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def read_architecture(directory: Path) -> Architecture:
    """Architecture of the model in `directory`.

    Raises ModelIOError if config.json is missing or malformed, UnsupportedModelError if it asks for something
    this engine does not compute.
    """
    config = _read_json(directory / "config.json")
    try:
        return _architecture(config, _eos_ids(directory, config))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelIOError(f"{directory / 'config.json'} lacks or misstates a value: {error!r}") from error


def _architecture(config: Mapping[str, Any], eos_ids: tuple[int, ...]) -> Architecture:
    family = _family(config)
    _refuse_unknown(config)
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    max_positions = int(config.get("max_position_embeddings") or _MAX_POSITIONS[family])
    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    tied = config.get("tie_word_embeddings")
    return Architecture(
        family=family,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        rope=_rope(config, head_dim, max_positions),
        has_qkv_bias=attention_bias or family == "qwen2",
        has_output_bias=attention_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        has_qk_norm=family == "qwen3",
        is_tied=None if tied is None else bool(tied),
        window=_window(config, family),
        eos_token_ids=eos_ids,
    )


def _family(config: Mapping[str, Any]) -> str:
    classes = config.get("architectures") or []
    if classes:
        family = _CLASSES.get(str(classes[0]))
    else:
        family = config.get("model_type") if config.get("model_type") in FAMILIES else None
    if family is None:
        asked = classes[0] if classes else config.get("model_type")
        raise UnsupportedModelError(f"architecture {asked} is not supported; known: {', '.join(_CLASSES)}")
    return family


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {act!r} is not supported; known: silu")
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise UnsupportedModelError(
            f"weights quantised with {method!r} are not supported; use bf16, fp16 or fp32 weights, or GGUF"
        )


def _window(config: Mapping[str, Any], family: str) -> int | None:
    """How far attention looks back, where a configuration limits it for any layer."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        strange = set(layer_types) - {"full_attention", "sliding_attention"}
        if strange:
            raise UnsupportedModelError(f"attention layers of type {sorted(strange)} are not supported")
    if family == "mistral":
        window = config.get("sliding_window", _MISTRAL_WINDOW)
    elif config.get("use_sliding_window") and (layer_types is None or "sliding_attention" in layer_types):
        window = config.get("sliding_window")
    else:
        window = None
    return int(window) if window else None


def _rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeParams:
    """Both forms: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`."""
    given: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    fraction = given.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    original = given.get("original_max_position_embeddings") or max_positions
    factor = given.get("factor")
    if factor is None:
        factor = max_positions / original if kind == "yarn" else 1.0
    attention_factor = given.get("attention_factor")
    return RopeParams(
        kind=kind,
        theta=float(given.get("rope_theta", config.get("rope_theta")) or 10000.0),
        rotary_dim=int(head_dim * fraction),
        factor=float(factor),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        original_max_positions=int(original),
        attention_factor=None if attention_factor is None else float(attention_factor),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        mscale=float(given.get("mscale") or 0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0),
        is_truncated=bool(given.get("truncate", True)),
    )


def _eos_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The generation configuration knows all ends of a turn, the model configuration often only one."""
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelIOError(f"{path} is missing: not a Hugging Face model directory") from error
    except (OSError, ValueError) as error:
        raise ModelIOError(f"{path} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise ModelIOError(f"{path} does not hold a JSON object")
    return value
