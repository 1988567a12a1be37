"""A bad adapter fails its own requests, with the reason; no name leads out of the configured directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import (
    AdapterLimitError,
    AdapterNotFoundError,
    EngineError,
    ModelIOError,
    UnsupportedModelError,
)
from engine_helpers import TinyModels
from lora_helpers import EVERYTHING, NAMES, Driver, write_adapter
from safetensors.torch import load_file, save_file

Maker = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> Path:
    where = tmp_path_factory.mktemp("adapters")
    for name in NAMES:
        write_adapter(tiny, "llama-tied", name, where)
    return where


def change_config(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = path / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def first(weights: dict[str, torch.Tensor]) -> str:
    return min(weights)


def poison(weights: dict[str, torch.Tensor]) -> None:
    weights[first(weights)][0, 0] = float("inf")


def rename_to_pickle(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


Q = "base_model.model.model.layers.0.self_attn.q_proj."
# What is wrong, the error, what its text says. Changes of the configuration, or a function of the directory.
BAD: tuple[tuple[Any, type[EngineError], str], ...] = (
    ({"use_dora": True}, UnsupportedModelError, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "modules_to_save"),
    ({"bias": "lora_only"}, UnsupportedModelError, "bias is 'lora_only'"),
    ({"lora_bias": True}, UnsupportedModelError, "lora_bias"),
    ({"fan_in_fan_out": True}, UnsupportedModelError, "fan_in_fan_out"),
    ({"layer_replication": [[0, 2]]}, UnsupportedModelError, "layer_replication"),
    ({"trainable_token_indices": [1]}, UnsupportedModelError, "trainable_token_indices"),
    ({"target_parameters": ["x"]}, UnsupportedModelError, "target_parameters"),
    ({"something_new": {"a": 1}}, UnsupportedModelError, "something_new"),
    ({"init_lora_weights": "pissa_niter_4"}, UnsupportedModelError, "pissa_niter_4"),
    ({"peft_type": "IA3"}, UnsupportedModelError, "peft_type is 'IA3'"),
    ({"task_type": "SEQ_CLS"}, UnsupportedModelError, "task_type"),
    ({"target_modules": ["q_proj", "lm_head"]}, UnsupportedModelError, "lm_head"),
    ({"target_modules": ["embed_tokens"]}, UnsupportedModelError, "embed_tokens"),
    ({"target_modules": ["c_attn"]}, UnsupportedModelError, "names no linear layer"),
    ({"target_modules": []}, ModelIOError, "target_modules is empty"),
    ({"target_modules": "(q_proj"}, ModelIOError, "misstates"),
    ({"target_modules": None}, ModelIOError, "misstates"),
    ({"r": 0}, ModelIOError, "a rank is 0"),
    ({"r": "8"}, ModelIOError, "a rank is '8'"),
    ({"lora_alpha": None}, ModelIOError, "alpha is None"),
    ({"r": 65}, AdapterLimitError, "rank 65 .* the limit is 64"),
    ({"rank_pattern": {"q_proj": 100}}, AdapterLimitError, "rank 100"),
    ({"r": 4}, ModelIOError, "has shape"),
    ({"target_modules": EVERYTHING}, ModelIOError, r"lacks .* \(30 tensors are missing\)"),
    ({"target_modules": ["q_proj"]}, ModelIOError, r"holds .*v_proj"),
    (lambda path: (path / "adapter_config.json").unlink(), AdapterNotFoundError, "not there"),
    (lambda path: (path / "adapter_config.json").write_text("{"), ModelIOError, "cannot be read"),
    (lambda path: (path / "adapter_config.json").write_text("[]"), ModelIOError, "JSON object"),
    (lambda path: (path / "adapter_config.json").write_text(" " * (1 << 21)), ModelIOError, "1048576 bytes"),
    (lambda path: (path / "adapter_model.safetensors").unlink(), ModelIOError, "is missing$"),
    (rename_to_pickle, ModelIOError, "unpickled"),
    (lambda path: (path / "adapter_model.safetensors").write_bytes(b"12"), ModelIOError, "truncated"),
    (
        lambda path: change_weights(path, lambda w: w.update({Q + "lora_magnitude_vector": torch.ones(2)})),
        UnsupportedModelError,
        "lora_magnitude_vector",
    ),
    (
        lambda path: change_weights(path, lambda w: w.update({k: v.double() for k, v in w.items()})),
        UnsupportedModelError,
        "stored as F64",
    ),
    (lambda path: change_weights(path, lambda w: w.pop(first(w))), ModelIOError, "lacks"),
)


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_bad_adapter_fails_its_own_request_with_the_reason(
    case: int, folder: Path, tmp_path: Path, shared_engine: Engine
) -> None:
    change, kind, text = BAD[case]
    name = f"bad{case}"
    path = Path(shared_engine._config.lora_roots[0]) / name
    shutil.copytree(folder / "plain", path)
    if callable(change):
        change(path)
    else:
        change_config(path, **change)
    with pytest.raises(kind, match=text):
        shared_engine.check_adapter(name)
    driver = Driver(shared_engine)
    driver.submit("bad", name)
    driver.submit("good", "plain")
    driver.until_end("bad", "good")
    assert driver.got.finish("good") == "length"
    assert driver.got.finish("bad") == "error"
    assert driver.got.ends["bad"].message
    assert driver.leases() == {}


@pytest.fixture(scope="module")
def shared_engine(tiny: TinyModels, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from allspark_workers.engine.types import ModelConfig
    from allspark_workers.models.loader import load_model

    roots = (str(tmp_path_factory.mktemp("bad")), str(folder))
    config = ModelConfig(str(tiny.path("llama-tied")), num_threads=1, dtype="fp32", lora_roots=roots)
    engine = Engine(load_model(config), config)
    engine.start()
    yield engine
    engine.stop()


def test_values_that_are_not_finite_are_refused(folder: Path, tmp_path: Path, make_engine: Maker) -> None:
    """Only loading finds them: the headers are fine."""
    shutil.copytree(folder / "plain", tmp_path / "a")
    change_weights(tmp_path / "a", poison)
    engine = make_engine(lora_roots=(str(tmp_path),))
    engine.check_adapter("a")
    driver = Driver(engine)
    driver.submit("r", "a")
    driver.until_end("r")
    assert driver.got.finish("r") == "error" and "not finite" in driver.got.ends["r"].message
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(folder / "plain", tmp_path / "a")
    driver.submit("again", "a")
    driver.until_end("again")
    assert driver.got.finish("again") == "length", "a repaired adapter works at the next request"


@pytest.mark.parametrize("name", ["../outside", "/etc", "link", ".", "", "a\0b", "no/such", "x" * 5000])
def test_no_name_leads_out_of_the_roots(name: str, folder: Path, tmp_path: Path, make_engine: Maker) -> None:
    shutil.copytree(folder / "plain", tmp_path / "outside")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    shutil.copytree(folder / "plain", tmp_path / "root" / "sub" / "inner")
    engine = make_engine(lora_roots=(str(tmp_path / "root"),))
    with pytest.raises(AdapterNotFoundError):
        engine.check_adapter(name)
    for good in ("sub/inner", str(tmp_path / "root" / "sub" / "inner"), "sub/../sub/inner"):
        engine.check_adapter(good)
