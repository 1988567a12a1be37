"""The tokenizer inside a GGUF file: byte-level BPE with the pre-tokenizer that the file names.

``tokenizer.ggml.pre`` selects how text is cut before merging. A wrong cut gives plausible but different ids,
so an unknown name is an error and never replaced by a guess.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from allspark_workers.text.errors import TextError

_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class _Cut(NamedTuple):
    """How one family of vocabularies cuts text."""

    pattern: str | None  # None: the pattern of GPT-2
    splits_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False  # a piece that is in the vocabulary is taken whole
    adds_bos: bool = False  # unless the file says otherwise


_CUTS = {
    "gpt-2": _Cut(None),
    "smollm": _Cut(None, splits_digits=True),
    "llama-bpe": _Cut(_LLAMA3, ignores_merges=True, adds_bos=True),
    "llama3": _Cut(_LLAMA3, ignores_merges=True, adds_bos=True),
    "llama-v3": _Cut(_LLAMA3, ignores_merges=True, adds_bos=True),
    "qwen2": _Cut(_QWEN2, is_nfc=True),
}


class GgufTokenizer(NamedTuple):
    """What a GGUF header says about text."""

    raw: RawTokenizer
    adds_bos: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None


def from_header(header: dict[str, Any], path: Path) -> GgufTokenizer:
    """Build the tokenizer; raises ``TextError`` for a kind of vocabulary that is not known here."""
    kind, pre = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _CUTS:
        raise TextError(
            f"{path} holds a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}; known are gpt2 with "
            f"{', '.join(_CUTS)}. Name the model's tokenizer.json with --tokenizer"
        )
    cut = _CUTS[pre]
    bos = header.get("tokenizer.ggml.bos_token_id")
    ends = [header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return GgufTokenizer(
        raw=_build(header, cut),
        adds_bos=bool(header.get("tokenizer.ggml.add_bos_token", cut.adds_bos)) and bos is not None,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        chat_template=header.get("tokenizer.chat_template"),
    )


def _build(header: dict[str, Any], cut: _Cut) -> RawTokenizer:
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    kinds: list[int] = header.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [_merge(text) for text in header.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    raw = RawTokenizer(models.BPE(vocabulary, merges, ignore_merges=cut.ignores_merges))
    if cut.is_nfc:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = _pre_tokenizer(cut)
    raw.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            raw.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            raw.add_tokens([AddedToken(token, normalized=False)])
    return raw


def _merge(text: str) -> tuple[str, str]:
    """A merge is two pieces with one space between; a piece itself never contains one."""
    left, _, right = text.partition(" ")
    return left, right


def _pre_tokenizer(cut: _Cut) -> pre_tokenizers.PreTokenizer:
    if cut.pattern is not None:
        split = pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, to_bytes])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if cut.splits_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2
