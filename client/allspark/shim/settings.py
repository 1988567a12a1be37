"""What a shim is told when its directory is written: gateways, and which model a client's name means."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from allspark.client import Access

FILE_NAME = "shim.json"


class ShimError(RuntimeError):
    """A shim that cannot be written or cannot run; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model of the fleet. ``path``: where the workers find it if it has to be built first, or ""."""

    model: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class ShimSettings:
    """``grpc``: addresses of gateways. ``models``: a client's name for a model -> what it means; the key
    ``*`` is every name that has no entry. Without any entry a name is the fleet's model of that name.
    ``access_files``: paths for ``Access.from_files``, by its arguments."""

    grpc: tuple[str, ...]
    models: dict[str, Target] = field(default_factory=dict)
    access_files: dict[str, str] = field(default_factory=dict)

    def access(self) -> Access:
        """Certificates and token; raises ``ShimError`` if their files cannot be used."""
        try:
            return Access.from_files(**{name: Path(path) for name, path in self.access_files.items()})
        except (OSError, ValueError, TypeError) as error:
            raise ShimError(f"the files for TLS and token cannot be used: {error}") from error

    def target(self, name: str) -> Target | None:
        """What a client's name for a model means; None if it means nothing here."""
        if not self.models:
            return Target(name)
        return self.models.get(name) or self.models.get("*")

    def write(self, directory: Path) -> None:
        """Keep them in the shim's directory."""
        (directory / FILE_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "ShimSettings":
        """Raises ``ShimError`` if the directory was not written by ``allspark dashinfer-shim``."""
        try:
            kept = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
            models = {name: Target(**target) for name, target in kept["models"].items()}
            return cls(tuple(kept["grpc"]), models, dict(kept["access_files"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ShimError(
                f"{directory / FILE_NAME} cannot be used ({error}): write the directory again with "
                "allspark dashinfer-shim"
            ) from error


def parse_models(texts: Sequence[str]) -> dict[str, Target]:
    """``NAME=MODEL`` or ``NAME=MODEL@PATH``, NAME ``*`` for every other name; raises ``ShimError``."""
    models: dict[str, Target] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        model, _, path = rest.partition("@")
        if not (name and equals and model):
            raise ShimError(
                f"--model {text!r} is not NAME=MODEL or NAME=MODEL@PATH; * as NAME means every other"
            )
        if name in models:
            raise ShimError(f"--model gives the name {name!r} two meanings")
        models[name] = Target(model, path)
    return models
