"""From a request to its guide, off the event loop and off the engine's thread."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from allspark_bus import response_format
from allspark_bus.response_format import Document
from allspark_proto import allspark_service_pb2 as pb

from allspark_workers.guided.compiler import Compiler
from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.sources import Recent, Source, model_source, request_source
from allspark_workers.guided.trial import Trials

if TYPE_CHECKING:
    from allspark_workers.engine.types import ModelFacts
    from allspark_workers.guided.guide import Guide

Result = TypeVar("Result")

_THREADS: Final = 2
#: Compiled documents kept.
MAX_DOCUMENTS: Final = 128
#: Memory that one compiled document may take.
MAX_COMPILED_BYTES: Final = 64 << 20


class _Order(NamedTuple):
    """What is to be compiled for a request, and whether it is there already."""

    digest: bytes
    source: Source
    eos_ids: tuple[int, ...]
    is_compiled: bool


class Guides:
    """Guides for the requests of a worker; call it on the event loop.

    A document may have `max_bytes` and take `cpu_s` seconds of CPU time; `max_documents` are kept compiled.
    """

    def __init__(self, max_bytes: int, cpu_s: float, max_documents: int = MAX_DOCUMENTS) -> None:
        self._max_bytes = max_bytes
        self._trials = Trials(cpu_s, MAX_COMPILED_BYTES)
        self._pool = ThreadPoolExecutor(_THREADS, "guided")
        self.compiler = Compiler(max_documents)
        self._tried: Recent[Document, bool] = Recent(max_documents)  # that have passed

    async def prepare(
        self, config: pb.GenerateConfig, facts: ModelFacts, generated: Sequence[int]
    ) -> Guide | None:
        """The guide of a request that has generated these tokens already; None if it asks for none.

        Raises GuideError, ParamError or LimitError, whatever the document is.
        """
        document = response_format.document(config.response_format)
        if document is None:
            return None
        self._check_size(document)
        order = await self._run(partial(self._order, config, facts, document))
        if not order.is_compiled:
            await self._try(document)
        digest, source, eos_ids, _ = order
        return await self._run(partial(self.compiler.guide, document, digest, source, eos_ids, generated))

    async def check(self, document: Document) -> None:
        """Raises GuideError for a document that cannot be compiled here, whatever the vocabulary is."""
        self._check_size(document)
        await self._try(document)

    def _check_size(self, document: Document) -> None:
        if (size := len(document.text.encode())) > self._max_bytes:
            raise GuideError(f"{document.kind} has {size} bytes, this worker's limit is {self._max_bytes}")

    async def _try(self, document: Document) -> None:
        if self._tried.get(document) is None:
            await self._trials.check(document)
            self._tried.put(document, True)

    async def close(self) -> None:
        """Ends threads and children."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._trials.close()

    async def _run(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, _without_panic, call)

    def _order(self, config: pb.GenerateConfig, facts: ModelFacts, document: Document) -> _Order:
        digest, make = vocabulary_of(config, facts)
        source = self.compiler.source(digest, make)
        eos_ids = end_tokens(config, source.control)
        return _Order(digest, source, eos_ids, self.compiler.knows(digest, document, eos_ids))


def vocabulary_of(config: pb.GenerateConfig, facts: ModelFacts) -> tuple[bytes, Callable[[], Source]]:
    """The request's vocabulary, or else the model's: its digest, and how to make it."""
    size = facts.vocab_size
    state = hashlib.blake2b(size.to_bytes(8, "big"), digest_size=16)
    if config.vocab:
        entries = pb.GenerateConfig(vocab=config.vocab, vocab_type=config.vocab_type)
        state.update(b"request" + entries.SerializeToString(deterministic=True))
        return state.digest(), partial(request_source, config.vocab, config.vocab_type, size)
    paths = facts.tokenizer_paths
    state.update(f"model {facts.digest} {paths}".encode())
    return state.digest(), partial(model_source, paths, size)


def end_tokens(config: pb.GenerateConfig, control: frozenset[int]) -> tuple[int, ...]:
    """Ids that may follow a complete document: eos, and control tokens that are stop words of their own.

    A model with several end tokens has only one of them in eos_token_id; clients put the others there.
    """
    ends = [config.eos_token_id] if config.eos_token_id >= 0 else []
    words = (array.word for array in config.stop_words_ids.ids)
    ends += [word[0] for word in words if len(word) == 1 and word[0] in control]
    return tuple(dict.fromkeys(ends))


def _without_panic(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        # A panic of the library: its own kind of exception, which would otherwise end the worker.
        raise GuideError(f"the grammar library failed: {error}") from error
