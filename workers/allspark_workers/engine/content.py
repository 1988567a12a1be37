"""What tells prompts apart that consist of the same tokens; imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from allspark_workers.engine.types import EmbeddingRun


def content_salt(runs: Sequence[EmbeddingRun]) -> bytes:
    """128-bit hash of where the runs are and what they hold; b"" if there are none."""
    if not runs:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for run in runs:
        rows, hidden = run.values.shape
        digest.update(b"%d:%d:%d:" % (run.start, rows, hidden))
        digest.update(run.values.astype("<f4", copy=False).tobytes())
    return digest.digest()
