"""What distinguishes single families, beyond what every family is checked for in test_reference.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import ModelIOError, UnsupportedModelError
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.families import FAMILIES
from allspark_workers.models.hf_config import read_architecture
from allspark_workers.models.loader import load_model
from engine_helpers import COMMON, TinyModels, build_reference, random_prompt, request, run_all
from test_reference import record_logits, reference_logits

Maker = Callable[..., Engine]
TRAINED, EXTENDED = 160, 640


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Phi-3 whose two sets of rope factors differ a lot."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.5 + 1.3 * i for i in range(8)],
    }
    model = build_reference(
        "phi3",
        rope_parameters=rope,
        original_max_position_embeddings=TRAINED,
        max_position_embeddings=EXTENDED,
        sliding_window=None,
    )
    path = tmp_path_factory.mktemp("longrope")
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize(
    ("max_length", "lengths"), [(TRAINED, (1, 33, 159)), (EXTENDED, (161, 500)), (0, (200,))]
)
def test_longrope_takes_the_factors_of_the_longest_request(
    longrope: Any, max_length: int, lengths: tuple[int, ...], make_engine: Maker, monkeypatch: Any
) -> None:
    """Short factors up to the trained context, long ones beyond it: as the reference does by length."""
    model, path = longrope
    for chunk in (512, 50):
        engine = make_engine(path, max_length=max_length, prefill_chunk=chunk)
        logits = record_logits(engine, monkeypatch)
        prompts = {f"p{n}": random_prompt(n) for n in lengths}
        run_all(engine, [request(name, ids, 1) for name, ids in prompts.items()])
        for name, ids in prompts.items():
            difference = (logits[name] - reference_logits(model, ids)).abs().max().item()
            assert difference <= 1e-4, f"{name} chunk {chunk}: {difference}"


def test_models_for_short_and_long_contexts_are_not_the_same_model(longrope: Any) -> None:
    """What one caches is of no use to the other, so their digests differ."""
    short, long = (load_model(ModelConfig(str(longrope[1]), max_length=n)) for n in (TRAINED, EXTENDED))
    assert short.digest != long.digest
    assert not torch.equal(short.decoder.cos_sin, long.decoder.cos_sin[:TRAINED])


def test_old_names_of_longrope_are_read(longrope: Any, tmp_path: Path) -> None:
    new = read_architecture(longrope[1]).rope
    config = json.loads((longrope[1] / "config.json").read_text())
    old = config.pop("rope_parameters")
    scaling = {"type": "su", "short_factor": old["short_factor"], "long_factor": old["long_factor"]}
    fraction = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config | fraction))
    assert read_architecture(tmp_path).rope == new
    config["rope_scaling"] = {"type": "su", "short_factor": old["short_factor"][:3], "long_factor": [1.0] * 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=r"config\.json lacks or misstates a value.*rope divisors"):
        read_architecture(tmp_path)


def test_every_family_is_compared_with_transformers(tiny: TinyModels) -> None:
    """The table of families and the variants of test_reference.py name the same ones."""
    from engine_helpers import VARIANTS

    compared = {f"{family}ForCausalLM" for family, _ in VARIANTS.values()}
    assert compared == {family.hf_class for family in FAMILIES.values()}
    for family in FAMILIES.values():
        assert hasattr(transformers, family.hf_class)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    config = COMMON | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model(ModelConfig(str(tmp_path)))
    assert "MambaForCausalLM is not supported; known: " in str(refusal.value)
    for family in FAMILIES.values():
        assert family.hf_class in str(refusal.value)


@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-window"])
def test_requests_may_be_longer_than_the_window(variant: str, tiny: TinyModels) -> None:
    assert load_model(ModelConfig(str(tiny.path(variant)))).max_length == 640


@pytest.mark.parametrize("variant", ["glm4", "gemma2", "gemma3", "qwen2-moe", "qwen3-moe"])
def test_logits_do_not_depend_on_chunks_neighbours_or_resumption(
    variant: str, make_engine: Maker, monkeypatch: Any
) -> None:
    """Windows, caps and experts keep the promise bit for bit: another request never changes a logit."""
    prompt = random_prompt(150)
    alone = make_engine(variant)
    expected = record_logits(alone, monkeypatch)
    tokens = run_all(alone, [request("target", prompt, 12, do_sample=True, seed=7)]).tokens["target"]
    others = [request(f"n{n}", random_prompt(n, seed=n), 9) for n in (1, 40, 77, 130)]
    for settings, done in (({"prefill_chunk": 13}, 0), ({"prefill_chunk": 64, "num_threads": 2}, 5)):
        engine = make_engine(variant, **settings)
        logits = record_logits(engine, monkeypatch)
        target = request("target", prompt, 12, do_sample=True, seed=7, generated=tokens[:done])
        assert run_all(engine, [*others, target]).tokens["target"] == tokens[done:]
        assert torch.equal(logits["target"], expected["target"]), (settings, done)


def config_with(tiny: TinyModels, tmp_path: Path, variant: str, **changes: Any) -> Path:
    """The configuration of a tiny model with some values changed (...: left out)."""
    config = json.loads((tiny.path(variant) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return tmp_path


def test_what_gemma_configurations_leave_unsaid(tiny: TinyModels, tmp_path: Path) -> None:
    silent = dict.fromkeys(
        ("layer_types", "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar"), ...
    )
    caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"), ...)
    two = read_architecture(config_with(tiny, tmp_path, "gemma2", **silent, **caps))
    assert two.windows == (4096, 0, 4096) and two.activation == "gelu_tanh"
    assert (two.attention_soft_cap, two.final_soft_cap, two.query_scale) == (50.0, 30.0, 1 / 16)
    three = read_architecture(
        config_with(tiny, tmp_path, "gemma3", **silent, num_hidden_layers=7, rope_parameters=...)
    )
    assert three.windows == (4096,) * 5 + (0, 4096)
    assert (three.attention_soft_cap, three.final_soft_cap) == (0.0, 0.0)
    assert three.local_rope is not None and (three.rope.theta, three.local_rope.theta) == (1e6, 1e4)
    old = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8},
    }
    three = read_architecture(config_with(tiny, tmp_path, "gemma3", rope_parameters=..., **old))
    assert three.local_rope is not None and (three.rope.theta, three.local_rope.theta) == (5e5, 2e4)
    assert (three.rope.kind, three.rope.factor, three.local_rope.kind) == ("linear", 8.0, "default")
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        read_architecture(config_with(tiny, tmp_path, "gemma3", use_bidirectional_attention=True))


def test_which_layers_have_experts(tiny: TinyModels, tmp_path: Path) -> None:
    def is_sparse(**changes: Any) -> tuple[bool, ...] | None:
        moe = read_architecture(config_with(tiny, tmp_path, "qwen3-moe", **changes)).moe
        return None if moe is None else moe.is_sparse

    assert is_sparse() == (False, True, False, True)
    assert is_sparse(decoder_sparse_step=1) == (True,) * 4
    assert is_sparse(decoder_sparse_step=1, mlp_only_layers=[0, 3]) == (False, True, True, False)
    assert is_sparse(decoder_sparse_step=9) is None
    with pytest.raises(ModelIOError, match="10 of 9 experts per token"):
        is_sparse(num_experts_per_tok=10)


def test_a_missing_expert_is_named(tiny: TinyModels, tmp_path: Path) -> None:
    path = config_with(tiny, tmp_path, "qwen3-moe", num_experts=10, num_local_experts=10)
    with pytest.raises(ModelIOError, match=r"no tensor model\.layers\.1\.mlp\.experts\.9\.gate_proj"):
        load_model(ModelConfig(str(path), weights_path=str(tiny.path("qwen3-moe"))))


def test_experts_count_in_the_memory_that_is_checked_before_loading(tiny: TinyModels) -> None:
    for variant in ("qwen2-moe", "qwen3-moe", "gemma3", "llama-tied"):
        model = load_model(ModelConfig(str(tiny.path(variant))))
        matrices = sum(p.numel() for n, p in tiny.reference(variant).named_parameters() if p.ndim > 1)
        assert 0.9 < model.arch.num_parameters / matrices < 1.3, variant
        assert model.weight_bytes >= 4 * matrices


@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_windows_and_caps_hold_in_a_quantised_cache(
    variant: str, make_engine: Maker, monkeypatch: Any
) -> None:
    """The error is that of 8-bit K and V alone: a wrong window or cap would show as another model."""
    results = []
    for mode in (0, 1):
        engine = make_engine(variant, cache_mode=mode)
        logits = record_logits(engine, monkeypatch)
        run_all(engine, [request(f"p{n}", random_prompt(n), 4) for n in (20, 90, 200)])
        results.append(torch.stack([logits[f"p{n}"] for n in (20, 90, 200)]))
    exact, rounded = results
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.03


def test_a_cached_prompt_longer_than_the_window_continues_alike(make_engine: Maker) -> None:
    engine = make_engine("gemma3", enable_prefix_cache=True, prefix_cache_ttl_s=300)
    first = run_all(engine, [request("first", random_prompt(200), 12)]).tokens["first"]
    assert run_all(engine, [request("second", random_prompt(200), 12)]).tokens["second"] == first
    assert engine.stat().prefix_cache_hit_token > 0
