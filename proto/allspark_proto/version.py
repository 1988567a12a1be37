"""The version of the distribution: pyproject.toml reads it from here."""

import re
from functools import cache
from importlib import resources
from pathlib import Path

VERSION = "0.1.0"

#: A build writes the commit into this file beside the module; a checkout does not have it.
SHA_FILE = "git_sha.txt"
UNKNOWN_SHA = "0000000"

_HEX = re.compile(r"[0-9a-f]{7,64}")


@cache
def version_full() -> str:
    """``<major>.<minor>.<patch>/(GitSha1:<hash>)``, the text of GetVersionFull."""
    return f"{VERSION}/(GitSha1:{git_sha()})"


def git_sha() -> str:
    """The first seven digits of the commit this code was built from, or ``0000000``."""
    recorded = resources.files("allspark_proto").joinpath(SHA_FILE)
    if recorded.is_file():
        return _short(recorded.read_text(encoding="ascii"))
    return _short(read_head(Path(__file__).resolve().parents[2] / ".git"))


def read_head(git: Path) -> str:
    """The commit that HEAD of a repository names; "" where there is none. Starts no process."""
    try:
        if git.is_file():  # a worktree: "gitdir: <path>"
            git = (git.parent / git.read_text(encoding="utf-8").partition(":")[2].strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head
        name = head.partition(":")[2].strip()
        common = git / "commondir"
        roots = [git, (git / common.read_text(encoding="utf-8").strip()) if common.is_file() else git]
        for root in roots:
            if (root / name).is_file():
                return (root / name).read_text(encoding="utf-8").strip()
            if (root / "packed-refs").is_file():
                for line in (root / "packed-refs").read_text(encoding="utf-8").splitlines():
                    if line.endswith(" " + name):
                        return line.partition(" ")[0]
    except (OSError, UnicodeDecodeError):
        return ""
    return ""


def _short(sha: str) -> str:
    return sha.strip()[:7] if _HEX.fullmatch(sha.strip()) else UNKNOWN_SHA
