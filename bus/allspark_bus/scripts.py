"""The server-side scripts (lua/*.lua): each is one atomic step of the ledger."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar


@dataclass(frozen=True)
class Script:
    """A script by its SHA-1, the way EVALSHA names it."""

    name: str
    sha: str

    _sources: ClassVar[dict[str, str]] = {}

    @classmethod
    def load(cls, name: str) -> "Script":
        """Reads lua/<name>.lua."""
        text = resources.files("allspark_bus").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        cls._sources[sha] = text
        return cls(name, sha)

    @classmethod
    def source(cls, sha: str) -> str:
        """The text of a loaded script."""
        return cls._sources[sha]

    def command(
        self, keys: Sequence[str], args: Sequence[str | bytes | int | float]
    ) -> tuple[str | bytes | int | float, ...]:
        """The EVALSHA command."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)
