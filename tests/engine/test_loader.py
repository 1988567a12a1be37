"""Hugging Face directories: configurations, damage, limits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allspark_workers.engine import promises
from allspark_workers.engine.errors import ModelIOError, ModelMemoryError, UnsupportedModelError
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.hf_config import read_architecture
from allspark_workers.models.loader import load_model
from engine_helpers import LLAMA3_ROPE, TinyModels
from safetensors.torch import load_file, save_file

Edit = Callable[[dict[str, Any]], None]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tiny: TinyModels, tmp_path: Path) -> Callable[..., Path]:
    """A private copy of a tiny model whose config.json was edited."""

    def make(variant: str = "llama-tied", **changes: Any) -> Path:
        target = tmp_path / "model"
        shutil.copytree(tiny.path(variant), target, dirs_exist_ok=True)
        config = json.loads((target / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not ...}
        (target / "config.json").write_text(json.dumps(config))
        return target

    return make


def test_checkpoints_are_read_through_an_index_or_from_one_file(tiny: TinyModels, tmp_path: Path) -> None:
    sharded = tiny.path("qwen3")
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    tiny.reference("qwen3").save_pretrained(tmp_path / "single")
    assert (tmp_path / "single" / "model.safetensors").exists()
    one = load_model(ModelConfig(str(tmp_path / "single"))).decoder
    many = load_model(ModelConfig(str(sharded))).decoder
    assert torch.equal(one.embedding, many.embedding)
    assert torch.equal(one.layers[2].qkv.unpack(), many.layers[2].qkv.unpack())
    assert torch.equal(one.lm_head.unpack(), many.lm_head.unpack())


def test_progress_rises_to_one(tiny: TinyModels) -> None:
    seen: list[tuple[float, str]] = []
    load_model(ModelConfig(str(tiny.path("qwen2"))), lambda share, text: seen.append((share, text)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == 1.0
    assert any("layer 2 of 3" in text for _, text in seen)


def test_auto_dtype_is_the_checkpoints(tiny: TinyModels, copy: Callable[..., Path]) -> None:
    assert load_model(ModelConfig(str(tiny.path("qwen2")))).dtype_name == "fp32"
    directory = copy("qwen2")
    for path in directory.glob("*.safetensors"):
        save_file({name: t.bfloat16() for name, t in load_file(path).items()}, path)
    model = load_model(ModelConfig(str(directory)))
    assert model.dtype_name == "bf16" and model.decoder.embedding.dtype is torch.bfloat16
    assert load_model(ModelConfig(str(directory), dtype="fp16")).dtype_name == "fp16"


def test_the_digest_tells_checkpoints_apart(tiny: TinyModels, copy: Callable[..., Path]) -> None:
    original = load_model(ModelConfig(str(tiny.path("qwen2")))).digest
    directory = copy("qwen2")
    assert load_model(ModelConfig(str(directory))).digest != original, "another spelling of config.json"
    same = load_model(ModelConfig(str(directory))).digest
    assert load_model(ModelConfig(str(directory))).digest == same
    path = next(p for p in directory.glob("*.safetensors") if "model.norm.weight" in load_file(p))
    save_file(load_file(path) | {"model.norm.weight": torch.zeros(64)}, path)
    assert load_model(ModelConfig(str(directory))).digest != same


def test_weights_may_lie_elsewhere(tiny: TinyModels, tmp_path: Path) -> None:
    shutil.copy(tiny.path("qwen2") / "config.json", tmp_path)
    config = ModelConfig(str(tmp_path), weights_path=str(tiny.path("qwen2")))
    assert load_model(config).arch.family == "qwen2"


def test_both_spellings_of_rope_are_read(copy: Callable[..., Path]) -> None:
    new = read_architecture(copy(rope_parameters=LLAMA3_ROPE)).rope
    old = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old["type"] = old.pop("rope_type")
    path = copy(rope_parameters=..., rope_scaling=old, rope_theta=10000.0)
    assert read_architecture(path).rope == new
    assert (new.kind, new.factor, new.original_max_positions) == ("llama3", 8.0, 64)


def test_ends_of_turn_come_from_the_generation_configuration(copy: Callable[..., Path]) -> None:
    directory = copy()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_architecture(directory).eos_token_ids == (2, 9)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(1025))}))
    with pytest.raises(ModelIOError, match="1025 ids in eos_token_id, the limit is 1024"):
        read_architecture(directory)
    (directory / "generation_config.json").unlink()
    assert read_architecture(directory).eos_token_ids == (2,)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; known: LlamaForCausalLM"),
    ({"architectures": [], "model_type": "gpt2"}, "gpt2 is not supported"),
    ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
]


@pytest.mark.parametrize(("changes", "reason"), UNSUPPORTED)
def test_what_is_not_supported_is_said(
    changes: dict[str, Any], reason: str, copy: Callable[..., Path]
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(ModelConfig(str(copy(**changes))))


DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": ...}, "config.json lacks or misstates"),
    ({"hidden_size": "many"}, "config.json lacks or misstates"),
    ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3\."),
    ({"intermediate_size": 81}, r"has shape \[80, 64\], the configuration says \[81, 64\]"),
    ({"num_key_value_heads": 3}, "4 heads of 16 over 3 KV heads"),
    ({"num_hidden_layers": 0}, "num_layers must be positive"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "factor 0"),
    ({"tie_word_embeddings": False}, r"no tensor lm_head\.weight"),
]


@pytest.mark.parametrize(("changes", "reason"), DAMAGE)
def test_a_configuration_that_does_not_fit_the_weights(
    changes: dict[str, Any], reason: str, copy: Callable[..., Path]
) -> None:
    with pytest.raises(ModelIOError, match=reason):
        load_model(ModelConfig(str(copy(**changes))))


def test_missing_and_truncated_files_are_named(copy: Callable[..., Path], tmp_path: Path) -> None:
    directory = copy()
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    for size in (0, 4, 100, len(content) - 1):
        shard.write_bytes(content[:size])
        with pytest.raises(ModelIOError, match=shard.name):
            load_model(ModelConfig(str(directory)))
    shard.unlink()
    with pytest.raises(ModelIOError, match=f"{shard.name} is missing"):
        load_model(ModelConfig(str(directory)))
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ModelIOError, match="has neither"):
        load_model(ModelConfig(str(directory)))
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelIOError, match=r"config\.json is unreadable"):
        load_model(ModelConfig(str(directory)))
    with pytest.raises(ModelIOError, match="does not exist"):
        load_model(ModelConfig(str(tmp_path / "nothing")))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_cannot_lead_out_of_the_directory(name: Any, copy: Callable[..., Path]) -> None:
    directory = copy()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ModelIOError, match=r"not a (plain file name|safetensors index)"):
        load_model(ModelConfig(str(directory)))


def test_an_untold_tie_is_decided_by_the_checkpoint(copy: Callable[..., Path]) -> None:
    model = load_model(ModelConfig(str(copy(tie_word_embeddings=...))))
    assert torch.equal(model.decoder.lm_head.unpack(), model.decoder.embedding)


def test_which_layers_have_a_window(copy: Callable[..., Path]) -> None:
    def windows(variant: str, **changes: Any) -> tuple[int, ...]:
        return read_architecture(copy(variant, **changes)).windows

    assert windows("mistral", sliding_window=48) == (48, 48, 48)
    assert windows("mistral", sliding_window=...) == (4096, 4096, 4096), "what Mistral means by silence"
    assert windows("mistral", sliding_window=None) == ()
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert windows("qwen2", use_sliding_window=True, sliding_window=33, layer_types=types) == (0, 33, 0)
    late = {"use_sliding_window": True, "sliding_window": 33, "layer_types": ..., "max_window_layers": 2}
    assert windows("qwen2", **late) == (0, 0, 33)
    assert windows("qwen2", use_sliding_window=False, sliding_window=33) == ()
    assert windows("llama-tied", sliding_window=33) == ()


def test_the_context_limits_the_length(tiny: TinyModels, caplog: pytest.LogCaptureFixture) -> None:
    assert load_model(ModelConfig(str(tiny.path("qwen2")), max_length=2048)).max_length == 640
    assert "cut to 640 tokens, its context" in caplog.text


def test_weights_that_do_not_fit_are_refused_before_loading(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "free_bytes", lambda device: 1000)
    with pytest.raises(ModelMemoryError, match="need 1 MiB as fp32, cpu has 1 MiB free"):
        load_model(ModelConfig(str(tiny.path("qwen2"))))


@pytest.mark.parametrize("device", ["cuda:99", "tpu"])
def test_a_device_that_does_not_exist(device: str, tiny: TinyModels) -> None:
    with pytest.raises(UnsupportedModelError, match=device):
        load_model(ModelConfig(str(tiny.path("qwen2")), device=device))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_path": ""}, "model_path is empty"),
        ({"dtype": "int3"}, "'int3' is unknown"),
        ({"span_size": 24}, "span_size 24"),
        ({"max_batch": -1}, "max_batch is -1"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
    ],
)
def test_a_wrong_model_config_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelConfig(**({"model_path": "x"} | fields))
