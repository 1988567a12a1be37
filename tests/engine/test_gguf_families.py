"""GGUF files of the later families: names from the format's own library, layout of its converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.gguf_families import ARCHITECTURES
from allspark_workers.models.loader import load_model
from engine_helpers import build_reference, random_prompt, request, run_all
from gguf import GGMLQuantizationType as Kind
from test_reference import record_logits, reference_logits

Maker = Callable[..., Engine]
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# variant -> (GGUF architecture, changes of the configuration, matrices stored as)
CASES: dict[str, tuple[str, dict[str, Any], Kind]] = {
    "phi3": ("phi3", {"intermediate_size": 96}, Kind.Q8_0),
    "glm4": ("glm4", {"intermediate_size": 96}, Kind.Q4_0),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "intermediate_size": 96}, Kind.Q8_0),
    "gemma3": (
        "gemma3",
        {
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": DEFAULT_ROPE,
            },
        },
        Kind.F32,
    ),
    "qwen2-moe": (
        "qwen2moe",
        {"mlp_only_layers": [], "moe_intermediate_size": 64, "use_sliding_window": False},
        Kind.Q8_0,
    ),
    "qwen3-moe": ("qwen3moe", {"decoder_sparse_step": 1, "moe_intermediate_size": 64}, Kind.Q4_1),
}


def parts(name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A parameter under checkpoint names: fused experts apart."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        return [
            (name.replace("gate_up_proj", f"{part}_proj.weight"), x)
            for part, x in (("gate", gate), ("up", up))
        ]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", values)]
    return [(name, values)]


def write(path: Path, model: Any, arch: str, kind: Kind) -> None:
    """Store `model` and put the rounded matrices back into it."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    which = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(which, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and not name.endswith((".gate.weight", "shared_expert_gate.weight"))
        if is_matrix:
            stored = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind).copy()))
        for part, values in parts(name, parameter.detach().numpy()):
            if arch.startswith("gemma") and part.endswith("norm.weight"):
                values = values + np.float32(1)  # the converter stores whole weights of norms
            if part.endswith("shared_expert_gate.weight"):
                values = values.squeeze(0)
            own = kind if is_matrix else Kind.F32
            target = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert target is not None, part
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("variant", list(CASES))
def test_logits_equal_transformers_with_the_stored_weights(
    variant: str, tmp_path: Path, make_engine: Maker, monkeypatch: Any
) -> None:
    arch, changes, kind = CASES[variant]
    model = build_reference(variant, **changes)
    write(tmp_path / "m.gguf", model, arch, kind)
    engine = make_engine(tmp_path / "m.gguf", dtype="fp32")
    assert engine.facts.model_type == ARCHITECTURES[arch]
    logits = record_logits(engine, monkeypatch)
    prompts = {f"p{n}": random_prompt(n) for n in (1, 40, 150)}
    run_all(engine, [request(name, ids, 1) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        difference = (logits[name] - reference_logits(model, ids)).abs().max().item()
        assert difference <= 1e-4, f"{variant} {name}: {difference}"


def test_a_configuration_beside_the_file_gives_the_same_model(tmp_path: Path, make_engine: Maker) -> None:
    """With config.json the architecture is Hugging Face's, the norms are still the file's."""
    arch, changes, kind = CASES["gemma2"]
    model = build_reference("gemma2", **changes)
    write(tmp_path / "m.gguf", model, arch, kind)
    model.config.save_pretrained(tmp_path / "configuration")
    prompts = [request(f"p{n}", random_prompt(n), 8) for n in (1, 80)]
    alone = run_all(make_engine(tmp_path / "m.gguf", dtype="fp32"), prompts).tokens
    beside = make_engine(tmp_path / "configuration", weights_path=str(tmp_path / "m.gguf"), dtype="fp32")
    assert run_all(beside, prompts).tokens == alone


def test_long_and_short_rope_factors_are_read(tmp_path: Path) -> None:
    arch, changes, kind = CASES["phi3"]
    rope = {
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    }
    model = build_reference(
        "phi3",
        **changes,
        original_max_position_embeddings=160,
        rope_parameters={"rope_type": "longrope", **rope},
    )
    original = gguf.GGUFWriter.add_layer_norm_rms_eps

    def with_rope(writer: gguf.GGUFWriter, eps: float) -> None:
        original(writer, eps)
        writer.add_rope_scaling_orig_ctx_len(160)
        for which in ("short", "long"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_layer_norm_rms_eps", with_rope)
        write(tmp_path / "m.gguf", model, arch, kind)
    for max_length, key in ((160, "short_factor"), (0, "long_factor")):
        loaded = load_model(ModelConfig(str(tmp_path / "m.gguf"), max_length=max_length))
        assert loaded.arch.rope.kind == "longrope"
        assert loaded.arch.rope.divisors == tuple(rope[key])
