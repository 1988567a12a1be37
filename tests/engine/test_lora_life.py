"""Which adapters are in memory, who counts on them, and what happens to bad ones."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allspark_workers.engine import adapters as pool_module
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import (
    AdapterLimitError,
    AdapterNotFoundError,
    EngineError,
    ModelIOError,
    UnsupportedModelError,
)
from engine_helpers import Collected, TinyModels, random_prompt, request
from lora_helpers import EVERYTHING, write_adapter
from safetensors.torch import load_file, save_file

Maker = Callable[..., Engine]
NAMES = ("plain", "stable", "layers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> Path:
    where = tmp_path_factory.mktemp("adapters")
    for name in NAMES:
        write_adapter(tiny, "llama-tied", name, where)
    return where


class Driver:
    """Steps an engine until something has happened."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.got = Collected()

    def submit(self, key: str, lora_name: str, new_tokens: int = 4, **fields: Any) -> None:
        fields.setdefault("prompt", random_prompt(7))
        self.engine.submit(request(key, fields.pop("prompt"), new_tokens, lora_name=lora_name, **fields))

    def step(self) -> None:
        assert self.engine.wait_for_work(20.0), "the engine has nothing to do"
        self.got.add(self.engine.step())

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            self.step()
        raise AssertionError("it did not happen in 2000 steps")

    def until_end(self, *keys: str) -> None:
        self.until(lambda: all(key in self.got.ends for key in keys))
        self.engine.check()

    def leases(self) -> dict[str, int]:
        pool = self.engine._adapters
        return {name: count for name in NAMES if (count := pool.num_leases(name))}


class Gate:
    """Holds loads back until it is opened; what has begun is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.begun = threading.Semaphore(0)
        original = pool_module.AdapterReader.load

        def load(reader: Any, *args: Any) -> Any:
            self.begun.release()
            assert self.is_open.wait(20.0)
            return original(reader, *args)

        monkeypatch.setattr(pool_module.AdapterReader, "load", load)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_the_least_recently_used_adapter_makes_room_and_comes_back(folder: Path, make_engine: Maker) -> None:
    engine = make_engine(lora_roots=(str(folder),), lora_max_num=2)
    driver = Driver(engine)
    tokens = {}
    for round_, name in enumerate(("plain", "stable", "plain", "layers", "stable", "plain")):
        driver.submit(f"r{round_}", name, 8)
        driver.until_end(f"r{round_}")
        assert driver.got.finish(f"r{round_}") == "length"
        tokens.setdefault(name, []).append(driver.got.tokens[f"r{round_}"])
        assert len(engine._adapters.loaded()) <= 2 and name in engine._adapters.loaded()
        if round_ == 3:
            assert set(engine._adapters.loaded()) == {"plain", "layers"}, "stable was the least recently used"
    assert all(one == runs[0] for runs in tokens.values() for one in runs), "a reloaded adapter differs"
    assert len({tuple(runs[0]) for runs in tokens.values()}) == 3
    assert driver.leases() == {}


def test_others_go_on_while_an_adapter_is_loaded(folder: Path, make_engine: Maker, gate: Gate) -> None:
    engine = make_engine(lora_roots=(str(folder),))
    driver = Driver(engine)
    driver.submit("slow", "plain")
    driver.submit("base", "", 20)
    driver.until_end("base")
    assert "slow" not in driver.got.tokens
    assert engine.step() == []
    assert not engine.has_work(), "an engine that waits for a file must not spin"
    assert engine.stat().pending_request == 1
    gate.is_open.set()
    driver.until_end("slow")
    assert driver.got.finish("slow") == "length"


@pytest.mark.parametrize("way", ["finish", "stop", "stop while loading", "deadline", "engine stop", "crash"])
def test_every_end_returns_the_lease(
    way: str, folder: Path, make_engine: Maker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    engine = make_engine(lora_roots=(str(folder),), clock=lambda: now_s[0])
    driver = Driver(engine)
    driver.submit("r", "plain", 12, deadline_s=50.0)
    driver.submit("mate", "plain", 3)
    driver.until(lambda: driver.leases() == {"plain": 2})
    if way == "stop while loading":
        engine.cancel("r")
        driver.until_end("r")
        assert driver.leases() == {"plain": 1}
    gate.is_open.set()
    driver.until_end("mate")
    if way == "stop":
        assert driver.leases() == {"plain": 1}
        engine.cancel("r")
    elif way == "deadline":
        now_s[0] = 60.0
    elif way == "crash":
        monkeypatch.setattr(engine._runner, "run", fail)
    if way == "engine stop":
        engine.stop()
        engine.start()
        assert engine._adapters.loaded() == ["plain"]
    else:
        driver.until_end("r")
        want = {"finish": "length", "deadline": "deadline", "crash": "error"}.get(way, "stopped")
        assert driver.got.finish("r") == want
    assert driver.leases() == {}
    engine.check()


def fail(*_: Any) -> list[int]:
    raise RuntimeError("the step failed")


def test_a_newer_epoch_takes_the_lease_over(folder: Path, make_engine: Maker, gate: Gate) -> None:
    engine = make_engine(lora_roots=(str(folder),))
    driver = Driver(engine)
    driver.submit("r", "plain")
    driver.until(lambda: driver.leases() == {"plain": 1})
    engine.submit(request("r", random_prompt(7), 4, epoch=2, lora_name="stable"))
    driver.until(lambda: "r" in driver.got.ends)
    assert driver.got.finish("r") == "stopped"
    driver.got = Collected()
    gate.is_open.set()
    driver.until_end("r")
    assert driver.got.finish("r") == "length"
    assert driver.leases() == {}


def test_held_requests_keep_their_adapter(folder: Path, make_engine: Maker) -> None:
    engine = make_engine(lora_roots=(str(folder),), lora_max_num=1)
    driver = Driver(engine)
    driver.submit("held", "plain", 8)
    driver.until(lambda: len(driver.got.tokens.get("held", [])) >= 2)
    engine.hold("held")
    driver.submit("other", "stable")
    driver.submit("base", "")
    driver.until_end("base")
    assert driver.leases() == {"plain": 1} and engine._adapters.loaded() == ["plain"]
    engine.resume("held")
    driver.until_end("held", "other")
    assert driver.got.finish("other") == "length"


def test_steady_traffic_for_one_adapter_does_not_keep_another_out(folder: Path, make_engine: Maker) -> None:
    now_s = [0.0]
    engine = make_engine(lora_roots=(str(folder),), lora_max_num=1, clock=lambda: now_s[0])
    driver = Driver(engine)
    driver.submit("p0", "plain", 6)
    driver.until(lambda: "p0" in driver.got.tokens)
    driver.submit("other", "stable", 3)
    serial = 1
    while "other" not in driver.got.ends:
        # Before the last one ends the next one is there.
        if len(driver.got.tokens.get(f"p{serial - 1}", [])) >= 2 or f"p{serial - 1}" in driver.got.ends:
            driver.submit(f"p{serial}", "plain", 6)
            serial += 1
        driver.step()
        now_s[0] += 0.05
        assert now_s[0] < 20 * pool_module.PATIENCE_S, "it never got its turn"
    overtook = [key for key in driver.got.ends if key.startswith("p")]
    assert 2 <= len(overtook) < serial, "overtaking is allowed for a while, and then no more"
    driver.until_end(*(f"p{i}" for i in range(serial)))


def test_adapters_named_at_build_are_loaded_then(folder: Path, make_engine: Maker, gate: Gate) -> None:
    gate.is_open.set()
    engine = make_engine(lora_roots=(str(folder),), lora_names=("stable", "plain", "stable"), lora_max_num=2)
    assert engine._adapters.loaded() == ["stable", "plain"]
    before = engine.stat().used_device_memory_pool_size
    driver = Driver(engine)
    driver.submit("r", "plain")
    driver.submit("new", "layers")
    driver.until_end("r", "new")
    assert [gate.begun.acquire(blocking=False) for _ in range(4)] == [True] * 3 + [False]
    assert engine.stat().used_device_memory_pool_size != before


def test_the_digest_of_the_files_is_on_the_request(folder: Path, make_engine: Maker, tmp_path: Path) -> None:
    """So that what is cached for one version of an adapter never serves another one of the same name."""
    shutil.copytree(folder / "plain", tmp_path / "a")
    engine = make_engine(lora_roots=(str(tmp_path),), lora_max_num=1)
    driver = Driver(engine)
    digests = []
    for key in ("first", "second", "changed"):
        item = request(key, random_prompt(7), 4, lora_name="a")
        if key == "changed":
            driver.submit("other", str(folder / "stable"))
            driver.until_end("other")
            assert driver.got.finish("other") == "error", "outside the roots"
            weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
            save_file({k: v * 2 for k, v in weights.items()}, tmp_path / "a" / "adapter_model.safetensors")
            engine._adapters._resident.clear()
        engine.submit(item)
        driver.until(lambda item=item: item.adapter is not None and item.adapter.is_in_force)
        digests.append(item.adapter.digest)
        driver.until_end(key)
        assert not item.adapter.is_in_force
    assert len(digests[0]) == 32 and digests[0] == digests[1] != digests[2]


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


def test_limits_on_the_number(folder: Path, make_engine: Maker) -> None:
    with pytest.raises(AdapterLimitError, match="2 adapters are to be loaded, the limit is 1"):
        make_engine(lora_roots=(str(folder),), lora_names=("plain", "stable"), lora_max_num=1)
    engine = make_engine(lora_roots=(str(folder),), lora_max_num=0)
    with pytest.raises(AdapterLimitError, match="allows none"):
        engine.check_adapter("plain")
    with pytest.raises(ValueError, match="allows none"):
        engine.submit(request("r", [5], lora_name="plain"))


def test_unloading_the_model_gives_the_memory_of_adapters_back(folder: Path, make_engine: Maker) -> None:
    engine = make_engine(lora_roots=(str(folder),), lora_names=("plain", "stable"))
    driver = Driver(engine)
    driver.submit("before", "plain", 8)
    driver.until_end("before")
    engine.stop()
    engine.unload(0)
    assert engine._adapters.loaded() == [] and engine._adapters.nbytes == 0
    engine.reload()
    engine.start()
    driver.submit("after", "plain", 8)
    driver.until_end("after")
    assert driver.got.tokens["after"] == driver.got.tokens["before"]
