"""The bytes that each token stands for, from raw entries; and tokenizers of the grammar library.

`vocab` holds raw tokenizer entries (spec 2.5.7). WPM, SPM, UGM: U+2581 is a space and <0xNN> one byte. BPE:
every character stands for one byte, by the table that GPT-2 introduced (byte-level BPE).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from allspark_proto import allspark_service_pb2 as pb
from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from allspark_workers.guided.errors import GuideError

#: The library's trie is at most this deep.
MAX_TOKEN_BYTES: Final = 1000
_SPACE: Final = "\u2581"
#: Types of tokens in GGUF: unknown, control, unused.
_GGUF_NO_TEXT: Final = (2, 3, 5)
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Tokens that mark something and are not text, by the names that tokenizers give them.
_CONTROL: Final = re.compile(
    r"<\|.*\|>|</?s>|<(?:unk|pad|bos|eos|mask|cls|sep|unused_?\d+|extra_id_\d+)>"
    r"|\[(?:UNK|PAD|BOS|EOS|MASK|CLS|SEP|unused\d+)\]",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[id]` is the token's text in UTF-8 (b"": there is no such token); `control` ids are not text."""

    tokens: list[bytes]
    control: list[int]


def read_entries(vocab: Mapping[str, int], vocab_type: int, size: int) -> Vocabulary:
    """The entries of a request for a model of `size` tokens; ids without an entry are never generated.

    Raises GuideError for an entry that no tokenizer has.
    """
    is_byte_level = vocab_type == pb.VOCAB_TYPE_BPE and not _is_sentencepiece(vocab)
    control = [index for entry, index in vocab.items() if _CONTROL.fullmatch(entry)]
    return _read(vocab.items(), control, is_byte_level, size)


def read_gguf(header: Mapping[str, Any], size: int) -> Vocabulary:
    """The entries of a GGUF header whose text cannot be cut here. Raises GuideError if it has none."""
    tokens = header.get("tokenizer.ggml.tokens", ())
    kinds = header.get("tokenizer.ggml.token_type")
    if kinds is None and isinstance(tokens, list | tuple):
        kinds = (1,) * len(tokens)
    if not isinstance(tokens, list | tuple) or not isinstance(kinds, list | tuple):
        raise GuideError("its header has tokens or types that are no lists")
    if not all(isinstance(entry, str) for entry in tokens):
        raise GuideError("its header has tokens that are no texts")
    if not tokens or len(kinds) != len(tokens) or len(tokens) > size:
        raise GuideError(f"its header has {len(tokens)} tokens and {len(kinds)} types, the model {size}")
    control = [index for index, kind in enumerate(kinds) if kind in _GGUF_NO_TEXT]
    is_byte_level = header.get("tokenizer.ggml.model") == "gpt2"
    return _read(((entry, index) for index, entry in enumerate(tokens)), control, is_byte_level, size)


def _read(
    entries: Iterable[tuple[str, int]], control: list[int], is_byte_level: bool, size: int
) -> Vocabulary:
    table = _byte_table() if is_byte_level else {}
    tokens, marks = [b""] * size, set(control)
    for entry, index in entries:
        if index in marks:
            tokens[index] = entry.encode()
        else:
            tokens[index] = _byte_level(entry, table) if is_byte_level else _piece(entry)
        if len(tokens[index]) > MAX_TOKEN_BYTES:
            raise GuideError(f"token {index} stands for more than {MAX_TOKEN_BYTES} bytes")
    return Vocabulary(tokens, control)


def _is_sentencepiece(vocab: Mapping[str, int]) -> bool:
    """SentencePiece models are often saved as BPE, and clients then say so; they spell bytes differently."""
    return "<0x00>" in vocab and "<0xFF>" in vocab


def _piece(entry: str) -> bytes:
    match = _BYTE.fullmatch(entry)
    return bytes([int(match[1], 16)]) if match else entry.replace(_SPACE, " ").encode()


def _byte_level(entry: str, table: Mapping[str, int]) -> bytes:
    try:
        return bytes([table[char] for char in entry])
    except KeyError:
        return entry.encode()  # an added token: it stands for itself


def _byte_table() -> dict[str, int]:
    """Character -> byte: printable Latin-1 is itself, the rest is U+0100 and on (Radford et al., 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    table = {chr(value): value for value in printable}
    return table | {chr(0x100 + index): value for index, value in enumerate(others)}


class _Words(TokenizerWrapper):
    """What the library asks of a tokenizer: the tokens, and how text that is forced would be cut."""

    def __init__(self, vocabulary: Vocabulary, eos_ids: Sequence[int], cutter: LLTokenizer | None) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted({*vocabulary.control, *eos_ids})
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self.is_tokenizer_wrapper = True
        self._cutter = cutter

    def __call__(self, text: str) -> list[int]:
        if self._cutter is None:
            raise RuntimeError("the tokenizer that only cuts text was asked to guide")
        return self._cutter.greedy_tokenize(text)


def from_entries(vocabulary: Vocabulary, eos_ids: Sequence[int]) -> LLTokenizer:
    """A tokenizer of `len(vocabulary.tokens)` tokens. Without merges, forced text is cut greedily."""
    cutter = LLTokenizer(_Words(vocabulary, eos_ids, None), slices=[])
    return LLTokenizer(_Words(vocabulary, eos_ids, cutter), eos_token=list(eos_ids))
