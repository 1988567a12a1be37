"""Chained keys of the leading spans of a prompt: workers find cached KV by them, brokers route by them.

A span's key hashes the key of the span before it and the span's own token ids, so it stands for everything
from position 0 to the span's end; the first parent is a hash of the salt. BLAKE2b (RFC 7693), 128 bits:
a chance collision among n keys has probability n²/2^129, and whoever serves cached KV still compares tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16
_ROOT = b"allspark root"
_SPAN = b"allspark span"


@dataclass(frozen=True, slots=True)
class PrefixSalt:
    """What decides the K and V of a span besides its tokens; any difference separates all keys.

    `model`: digest of configuration and weights; `adapter`: identity of the LoRA adapter, empty for the base
    model; `cache_mode`: number format of the KV cache; `embeddings`: content hash of embeddings that replace
    those of placeholder tokens, empty if there are none; `span_size`: tokens per span.
    """

    model: str
    span_size: int
    adapter: str = ""
    cache_mode: int = 0
    embeddings: str = ""

    def root(self) -> bytes:
        """The parent of the first span's key."""
        h = hashlib.blake2b(digest_size=KEY_BYTES, person=_ROOT)
        numbers = (str(self.span_size), str(self.cache_mode))
        for text in (self.model, self.adapter, self.embeddings, *numbers):
            field = text.encode()
            # Each field behind its length: no two different salts give the same bytes.
            h.update(len(field).to_bytes(8, "little") + field)
        return h.digest()


def child_key(parent: bytes, tokens: NDArray[np.int64]) -> bytes:
    """The key of a span with these token ids that follows the span (or root) with key `parent`."""
    h = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=_SPAN)
    h.update(tokens.astype("<i8", copy=False).tobytes())
    return h.digest()


def span_keys(salt: PrefixSalt, tokens: NDArray[np.int64], limit: int | None = None) -> Iterator[bytes]:
    """Keys of the full spans at the start of `tokens` [S], at most `limit`; a partial span has no key."""
    key, size = salt.root(), salt.span_size
    count = len(tokens) // size
    for index in range(count if limit is None else min(count, limit)):
        key = child_key(key, tokens[index * size : (index + 1) * size])
        yield key
