"""Which adapters are in memory, and who counts on them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from allspark_workers.engine import adapters as pool_module
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import AdapterLimitError
from engine_helpers import Collected, TinyModels, random_prompt, request
from lora_helpers import NAMES, Driver, write_adapter
from safetensors.torch import load_file, save_file

Maker = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> Path:
    where = tmp_path_factory.mktemp("adapters")
    for name in NAMES:
        write_adapter(tiny, "llama-tied", name, where)
    return where


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
