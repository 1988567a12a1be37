"""Models on the command line: ``PATH[=NAME]``, or the name of the demo model."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from allspark import demo_model
from allspark.cli.errors import CommandError


class LocalModel(NamedTuple):
    """A model on this machine and the name under which it is served."""

    name: str
    path: Path

    @property
    def root(self) -> Path:
        """The smallest directory that holds it."""
        return self.path if self.path.is_dir() else self.path.parent


def resolve(text: str) -> LocalModel:
    """Find a model; fetches the demo model if it is meant. Raises ``CommandError`` if there is none."""
    source, _, name = text.partition("=")
    if source == demo_model.NAME:
        return LocalModel(name or demo_model.NAME, _demo())
    path = Path(source).expanduser().resolve()
    if not path.exists():
        raise CommandError(
            f"model {source} does not exist: give a Hugging Face directory or a GGUF file, or smollm2"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"{path} has no config.json: it is not a Hugging Face model directory")
    return LocalModel(name or (path.name if path.is_dir() else path.stem), path)


def resolve_all(texts: Sequence[str]) -> list[LocalModel]:
    """``resolve`` for several; raises ``CommandError`` if two would get the same name."""
    models = [resolve(text) for text in texts]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise CommandError(f"two models would be called {name!r}; give them names with PATH=NAME")
    return models


def _demo() -> Path:
    from allspark.cli.console import activity, err

    try:
        if not demo_model.is_cached():
            err.print(f"Fetching the demo model ({demo_model.DOWNLOAD_TEXT}) into {demo_model.cache_dir()}")
        with activity("fetching the demo model"):
            return demo_model.fetch()
    except demo_model.DemoModelError as error:
        raise CommandError(str(error)) from error
