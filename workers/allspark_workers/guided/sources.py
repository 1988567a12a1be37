"""Vocabularies that documents are compiled for: the loaded model's own, or one that came with a request."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from llguidance import LLTokenizer

from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.vocabulary import Vocabulary, from_entries, read_entries, read_gguf
from allspark_workers.text import TextError, Tokenizer, load_tokenizer
from allspark_workers.text.gguf_header import read_header

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

#: Name of the token that ends a document where the request has no eos token; it is never generated.
_END: Final = "<|allspark-end-of-document|>"


class Recent(Generic[Key, Value]):
    """The `limit` values used last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """The value, which is now the one used last."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Keep a value at the cost of the one that was not used for longest."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value, made if it is not there."""
        value = self.get(key)
        if value is None:
            value = make()
            self.put(key, value)
        return value


class Words(NamedTuple):
    """A tokenizer of the library with model size + 1 ids; `hidden` marks the end where there is no eos."""

    tokenizer: LLTokenizer
    hidden: int | None


class Source(Protocol):
    """Where tokens come from. `control`: ids that are not text, so that they may end a document."""

    control: frozenset[int]

    def words(self, eos_ids: Sequence[int]) -> Words:
        """The library's view of it with these end tokens. Raises GuideError."""


class EntriesSource:
    """Entries, as a request brings them in `vocab` and `vocab_type`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.control = frozenset(vocabulary.control)

    def words(self, eos_ids: Sequence[int]) -> Words:
        """Not more than the entries is known: forced text is cut greedily."""
        tokens, control = self._vocabulary.tokens, self._vocabulary.control
        size = len(tokens)
        if eos_ids:
            return Words(from_entries(Vocabulary([*tokens, b""], control), eos_ids), None)
        return Words(from_entries(Vocabulary([*tokens, _END.encode()], [*control, size]), [size]), size)


class TokenizerSource:
    """The tokenizer of a model of `size` tokens. Raises GuideError if it has more."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        if tokenizer.vocab_size > size:
            raise GuideError(
                f"the model's tokenizer has {tokenizer.vocab_size} tokens, the model {size}; "
                "send the tokens that the model knows as vocab"
            )
        self._tokenizer = tokenizer
        self._size = size
        self.control = tokenizer.control_ids

    def words(self, eos_ids: Sequence[int]) -> Words:
        """Text that the document forces is cut as the model's tokenizer cuts it."""
        size = self._size + 1
        if eos_ids:
            return Words(LLTokenizer(readable(self._tokenizer.to_json()), size, list(eos_ids)), None)
        end = self._tokenizer.vocab_size
        return Words(LLTokenizer(readable(self._tokenizer.to_json(_END)), size, end), end)


def readable(tokenizer_json: str) -> str:
    """A tokenizer.json whose decoder the library understands; only what its tokens stand for is read from it.

    It takes U+2581 for a space where the decoder says so step by step, but not where it is called Metaspace.
    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    decoder = tokenizer.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    spaces = [step for step in steps if step.get("type") == "Metaspace"]
    if not spaces:
        return tokenizer_json
    mark = spaces[0].get("replacement", "\u2581")
    replace = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    tokenizer["decoder"] = {
        "type": "Sequence",
        "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    return json.dumps(tokenizer, ensure_ascii=False)


def request_source(vocab: Mapping[str, int], vocab_type: int, size: int) -> Source:
    """What a request brought for a model of `size` tokens. Raises GuideError."""
    return EntriesSource(read_entries(vocab, vocab_type, size))


def model_source(paths: Sequence[str], size: int) -> Source:
    """What the first of these model directories and GGUF files has that has something. Raises GuideError."""
    problems = []
    for path in map(Path, dict.fromkeys(paths)):
        try:
            return TokenizerSource(load_tokenizer(path), size)
        except (TextError, OSError) as error:
            problems.append(str(error))
        if path.suffix == ".gguf":
            # A kind of tokenizer that cannot cut text here still says what its tokens are.
            try:
                return EntriesSource(read_gguf(read_header(path), size))
            except (TextError, GuideError) as error:
                problems.append(f"{path}: {error}")
    why = "; ".join(problems) or "it names no files"
    raise GuideError(f"the model has no usable tokenizer ({why}): send its entries as vocab and vocab_type")
