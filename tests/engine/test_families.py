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
from allspark_workers.engine.errors import UnsupportedModelError
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
