"""The server-side scripts (lua/*.lua): each is one atomic step of the ledger."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import ClassVar

#: For what frees memory, or must go on while there is none: it adds a few bytes at most.
ALLOW_OOM = "allow-oom"
NO_WRITES = "no-writes"


@dataclass(frozen=True)
class Script:
    """A script by its SHA-1, the way EVALSHA names it.

    `flags`: see https://valkey.io/topics/eval-intro, script flags. Without ALLOW_OOM a script is refused as
    a whole while the memory is full; without any declaration it would be refused at its first command that
    needs memory, and not at all if it removed something before.
    """

    name: str
    sha: str

    _sources: ClassVar[dict[str, str]] = {}

    @classmethod
    def load(cls, name: str, flags: str = "") -> "Script":
        """Reads lua/<name>.lua."""
        body = resources.files("allspark_bus").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
        text = f"#!lua{flags and f' flags={flags}'}\n{body}"
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


#: One command that is run even while the memory is full: for the entries of indexes, which must not lack one.
ANYWAY = Script.load("anyway", ALLOW_OOM)
