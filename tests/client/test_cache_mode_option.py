"""``--cache-mode`` reaches the message that builds a model."""

from typing import Any

import pytest
from allspark.cli import load
from allspark.client import CACHE_MODES, ModelOptions
from allspark_bus.settings import ConfigError


class Recorder:
    """Stands in for the client: keeps the message that each build would send."""

    built: list[Any]

    def __init__(self, *_: Any, **__: Any) -> None:
        Recorder.built = []

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def build_model(self, name: str, path: str, options: ModelOptions, **_: Any) -> None:
        Recorder.built.append(options.to_config(name, path))

    def start_model(self, name: str) -> None:
        pass


@pytest.mark.parametrize(
    ("flags", "number"), [([], 0)] + [([f"--cache-mode={n}"], CACHE_MODES[n]) for n in CACHE_MODES]
)
def test_load_builds_with_the_cache_mode(
    flags: list[str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "Client", Recorder)
    assert load.run(["--model=/models/m=m", *flags]) == 0
    assert [config.cache_mode for config in Recorder.built] == [number]


def test_another_name_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match="int8"):
        load.run(["--model=/models/m=m", "--cache-mode=int4"])
