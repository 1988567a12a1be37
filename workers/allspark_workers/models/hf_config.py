"""Read a Hugging Face `config.json` (and `generation_config.json`) into an Architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allspark_workers.engine.errors import ModelIOError, UnsupportedModelError
from allspark_workers.files import read_text
from allspark_workers.models.architecture import (
    ROPE_TYPES,
    Activation,
    Architecture,
    MoeParams,
    RopeParams,
    checked_layers,
)
from allspark_workers.models.families import Family, find_family, known_classes

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Early configurations of Phi-3 call longrope by the names of its predecessors.
_PHI3_ROPE = {"su": "longrope", "yarn": "longrope"}
_MAX_BYTES = 16 << 20
_MAX_EOS_IDS = 1024


def read_architecture(directory: Path) -> Architecture:
    """Architecture of the model in `directory`.

    Raises ModelIOError if config.json is missing or malformed, UnsupportedModelError if it asks for something
    this engine does not compute.
    """
    config = _read_json(directory / "config.json")
    try:
        return _architecture(config, _eos_ids(directory, config))
    except (KeyError, AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelIOError(f"{directory / 'config.json'} lacks or misstates a value: {error!r}") from error


def _architecture(config: Mapping[str, Any], eos_ids: tuple[int, ...]) -> Architecture:
    family = _family(config)
    _refuse_unknown(config)
    num_layers = checked_layers(int(config["num_hidden_layers"]))
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    max_positions = int(config.get("max_position_embeddings") or family.max_positions)
    has_bias = family.has_qkv_bias
    if family.bias_key is not None:
        has_bias = bool(config.get(family.bias_key, has_bias))
    tied = config.get("tie_word_embeddings")
    rope, local_rope = _ropes(config, family, head_dim, max_positions)
    scalar = config.get("query_pre_attn_scalar", family.query_pre_attn_scalar)
    if scalar is not None and not float(scalar) > 0:
        raise ValueError(f"query_pre_attn_scalar is {scalar}")
    return Architecture(
        family=family.name,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", family.norm_eps)),
        max_positions=max_positions,
        rope=rope,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias and family.has_output_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)) and family.has_mlp_bias_key,
        has_qk_norm=family.has_qk_norm,
        is_tied=None if tied is None else bool(tied),
        windows=_windows(config, family, num_layers),
        eos_token_ids=eos_ids,
        activation=_activation(config, family),
        has_post_norms=family.names.mlp_post_norm is not None,
        is_rope_interleaved=family.is_rope_interleaved,
        norm_offset=family.norm_offset,
        embedding_scale=float(config["hidden_size"]) ** 0.5 if family.scales_embeddings else 1.0,
        query_scale=float(scalar) ** -0.5 if family.query_pre_attn_scalar is not None else None,
        attention_soft_cap=_cap(config, "attn_logit_softcapping", family, family.attention_soft_cap),
        final_soft_cap=_cap(config, "final_logit_softcapping", family, family.final_soft_cap),
        local_rope=local_rope,
        moe=_experts(config, family, num_layers),
    )


def _family(config: Mapping[str, Any]) -> Family:
    classes = config.get("architectures") or []
    asked = str(classes[0] if classes else config.get("model_type"))
    family = find_family(asked)
    if family is None:
        raise UnsupportedModelError(f"architecture {asked} is not supported; known: {known_classes()}")
    return family


def _activation(config: Mapping[str, Any], family: Family) -> Activation:
    asked = config.get("hidden_activation", config.get("hidden_act"))
    if asked is None:
        return family.activation
    if asked not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"activation {asked!r} is not supported; known: {known}")
    return _ACTIVATIONS[asked]


def _cap(config: Mapping[str, Any], key: str, family: Family, default: float) -> float:
    """A soft cap, of the families whose configurations know it."""
    return float(config.get(key, default) or 0.0) if family.query_pre_attn_scalar is not None else 0.0


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else "unknown"
        raise UnsupportedModelError(
            f"weights quantised with {method!r} are not supported; use bf16, fp16 or fp32 weights, or GGUF"
        )


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """The attention window of each layer, 0 where it sees everything; empty if no layer has one."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        strange = set(layer_types) - {"full_attention", "sliding_attention"}
        if strange:
            raise UnsupportedModelError(f"attention layers of type {sorted(strange)} are not supported")
        if len(layer_types) != num_layers:
            raise ValueError(f"{len(layer_types)} layer_types for {num_layers} layers")
    is_off = family.has_window_switch and not config.get("use_sliding_window")
    window = None if is_off else config.get("sliding_window", family.window)
    if not window or family.windows == "none":
        if family.local_rope_theta is not None:
            raise ValueError(f"sliding_window is {window}, but layers differ by it")
        return ()
    if layer_types is not None:
        is_local = [kind == "sliding_attention" for kind in layer_types]
    else:
        is_local = _local_layers(config, family, num_layers)
    return tuple(int(window) if local else 0 for local in is_local) if any(is_local) else ()


def _local_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> list[bool]:
    """Which layers the window belongs to where a configuration does not list them."""
    layers = range(num_layers)
    border = int(config.get("max_window_layers", 28))
    if family.windows == "late":
        return [i >= border for i in layers]
    if family.windows == "alternate_early":
        return [i % 2 == 0 and i < border for i in layers]
    if family.windows == "pattern":
        period = int(config.get("sliding_window_pattern") or family.window_pattern)
        return [(i + 1) % period != 0 for i in layers]
    return [True] * num_layers


def _experts(config: Mapping[str, Any], family: Family, num_layers: int) -> MoeParams | None:
    if not family.has_experts:
        return None
    count = config.get("num_experts", config.get("num_local_experts"))
    step = int(config.get("decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or ())
    is_sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    if not count or not any(is_sparse):
        return None
    return MoeParams(
        num_experts=int(count),
        top_k=int(config["num_experts_per_tok"]),
        expert_size=int(config["moe_intermediate_size"]),
        shared_size=int(config["shared_expert_intermediate_size"]) if family.has_shared_expert else 0,
        is_normalised=bool(config.get("norm_topk_prob", False)),
        is_sparse=is_sparse,
    )


def _ropes(
    config: Mapping[str, Any], family: Family, head_dim: int, max_positions: int
) -> tuple[RopeParams, RopeParams | None]:
    """Rotation of all layers and None, or that of layers without a window and of those with one."""
    given: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if family.local_rope_theta is None:
        return _rope(config, given, family, head_dim, max_positions), None
    local: Mapping[str, Any] = {"rope_theta": config.get("rope_local_base_freq")}
    if "full_attention" in given or "sliding_attention" in given:
        local, given = given.get("sliding_attention") or {}, given.get("full_attention") or {}
    local = {**local, "rope_theta": local.get("rope_theta") or family.local_rope_theta}
    return (
        _rope(config, given, family, head_dim, max_positions),
        _rope(config, local, family, head_dim, max_positions),
    )


def _rope(
    config: Mapping[str, Any], given: Mapping[str, Any], family: Family, head_dim: int, max_positions: int
) -> RopeParams:
    """`given`: `rope_parameters` (transformers 5), or `rope_scaling` with `rope_theta` beside it."""
    kind = str(given.get("rope_type", given.get("type", "default")))
    if family.name == "phi3":
        kind = _PHI3_ROPE.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    fraction = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    original = given.get("original_max_position_embeddings")
    if kind == "longrope":  # written beside the rope parameters, where it takes precedence
        original = config.get("original_max_position_embeddings") or original
    original = original or max_positions
    factor = given.get("factor")
    if factor is None:
        factor = max_positions / original if kind in ("yarn", "longrope") else 1.0
    attention_factor = given.get("attention_factor")
    return RopeParams(
        kind=kind,
        theta=float(given.get("rope_theta", config.get("rope_theta")) or family.rope_theta),
        rotary_dim=int(head_dim * (fraction or family.rotary_fraction)),
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
        short_divisors=tuple(map(float, given.get("short_factor") or ())),
        long_divisors=tuple(map(float, given.get("long_factor") or ())),
    )


def _eos_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The generation configuration knows all ends of a turn, the model configuration often only one."""
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    ids = tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
    if len(ids) > _MAX_EOS_IDS:  # every heartbeat of a worker has them
        raise ModelIOError(f"{directory} names {len(ids)} ids in eos_token_id, the limit is {_MAX_EOS_IDS}")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path, _MAX_BYTES))
    except FileNotFoundError as error:
        raise ModelIOError(f"{path} is missing: not a Hugging Face model directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelIOError(f"{path} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise ModelIOError(f"{path} does not hold a JSON object")
    return value
