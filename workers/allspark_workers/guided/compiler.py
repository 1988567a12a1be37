"""Documents compiled for vocabularies, both kept for the next request that has the same."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Final

from allspark_bus.response_format import Document
from llguidance import LLMatcher

from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.grammar import new_matcher
from allspark_workers.guided.guide import Guide
from allspark_workers.guided.sources import Recent, Source, Words

#: Vocabularies kept; one of 150,000 tokens takes about 40 MiB.
MAX_SOURCES: Final = 4
MAX_WORDS: Final = 8


class Compiler:
    """Any thread may call it; one compiles at a time. Nothing here is bounded in time: see `trial`."""

    def __init__(self, max_documents: int) -> None:
        self._lock = threading.Lock()
        self._sources: Recent[bytes, Source] = Recent(MAX_SOURCES)
        self._words: Recent[tuple[bytes, tuple[int, ...]], Words] = Recent(MAX_WORDS)
        self._matchers: Recent[bytes, tuple[LLMatcher, int | None]] = Recent(max_documents)
        self.num_compiled = 0

    def source(self, digest: bytes, make: Callable[[], Source]) -> Source:
        """The vocabulary with this digest."""
        with self._lock:
            return self._sources.get_or_make(digest, make)

    def knows(self, digest: bytes, document: Document, eos_ids: tuple[int, ...]) -> bool:
        """Whether `guide` would find the document compiled."""
        with self._lock:
            return self._matchers.get(_key(digest, document, eos_ids)) is not None

    def guide(
        self,
        document: Document,
        digest: bytes,
        source: Source,
        eos_ids: tuple[int, ...],
        generated: Sequence[int],
    ) -> Guide:
        """The document for the vocabulary `source`, whose digest is given, after the tokens `generated`.

        The first of `eos_ids` ends it, and so do the others. Raises GuideError.
        """
        with self._lock:
            try:
                matcher, hidden = self._matcher(document, digest, source, eos_ids)
            except GuideError:
                raise
            except Exception as error:
                raise GuideError(f"{document.kind}: {error}") from error
            guide = Guide(matcher.deep_copy(), frozenset(eos_ids), hidden)
        guide.replay(generated)
        return guide

    def _matcher(
        self, document: Document, digest: bytes, source: Source, eos_ids: tuple[int, ...]
    ) -> tuple[LLMatcher, int | None]:
        def compile_it() -> tuple[LLMatcher, int | None]:
            words = self._words.get_or_make((digest, eos_ids), lambda: source.words(eos_ids))
            self.num_compiled += 1
            return new_matcher(words.tokenizer, document), words.hidden

        return self._matchers.get_or_make(_key(digest, document, eos_ids), compile_it)


def _key(digest: bytes, document: Document, eos_ids: tuple[int, ...]) -> bytes:
    """Identity of a compiled document: vocabulary (entries, type, size, or the model), ends, text."""
    state = hashlib.blake2b(digest, digest_size=16)
    state.update(repr((eos_ids, document.kind, len(document.text))).encode())
    state.update(document.text.encode())
    return state.digest()
