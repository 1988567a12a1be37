"""Model and weight paths stay inside the configured model roots."""

from collections.abc import Sequence
from pathlib import Path

from allspark_bus.errors import FileError


def confine(path: str, roots: Sequence[Path]) -> Path:
    """The real path of an existing file or directory inside a root; relative ones are tried in each.

    Symbolic links are followed first, so a link cannot lead outside. Raises FileError otherwise.
    """
    if "\0" in path:
        raise FileError("a path must not contain a zero byte")
    if not roots:
        raise FileError(f"{path[:200]!r} cannot be loaded: this worker has no --model-root")
    missing = False
    for root in roots:
        real_root = root.resolve()
        try:
            real = (real_root / path).resolve()
            if real != real_root and real_root not in real.parents:
                continue
            if real.is_dir() or real.is_file():
                return real
        except (OSError, RuntimeError) as e:
            reason = e.strerror if isinstance(e, OSError) else e
            raise FileError(f"{path[:200]!r} cannot be resolved: {reason}") from e
        missing = True
    if missing:
        raise FileError(f"{path[:200]!r} does not exist, or is neither a file nor a directory")
    raise FileError(f"{path[:200]!r} is outside the model root ({', '.join(map(str, roots))})")
