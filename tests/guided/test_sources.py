"""Tokenizers of every make, from a model's directory or its GGUF file; decoded by the tokenizer itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from allspark import demo_model
from allspark_bus.response_format import Document
from allspark_workers.guided.compiler import Compiler
from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.guide import Guide
from allspark_workers.guided.sources import model_source
from allspark_workers.text import load_tokenizer
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.guided.conftest import make_tokenizer

CONTROL = ["<unk>", "<s>", "</s>"]
PIECES = ["\u2581", "a", "b", "c", "\u2581b", "\u2581a", "ab", "é", "!"]
ENTRIES = [*CONTROL, *(f"<0x{value:02X}>" for value in range(256)), *PIECES]
MERGES = [("\u2581", "b"), ("\u2581", "a"), ("a", "b")]
PATTERN = r"[abc é日]{12} ab!!"


def sentencepiece_bpe() -> Tokenizer:
    entries = {entry: index for index, entry in enumerate(ENTRIES)}
    return Tokenizer(models.BPE(entries, MERGES, byte_fallback=True, unk_token="<unk>", fuse_unk=True))


def step_by_step() -> Tokenizer:
    raw = sentencepiece_bpe()
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    raw.decoder = decoders.Sequence(steps)
    return raw


def metaspace() -> Tokenizer:
    raw = sentencepiece_bpe()
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return raw


def unigram() -> Tokenizer:
    scores = [(entry, -float(index)) for index, entry in enumerate(ENTRIES)]
    raw = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return raw


MAKES = {"step by step": step_by_step, "metaspace": metaspace, "unigram": unigram, "bytes": make_tokenizer}


def walk(guide: Guide, size: int, eos: int, seed: int = 3) -> list[int]:
    """Random allowed tokens up to eos."""
    rng, tokens = np.random.default_rng(seed), [-1]
    while tokens[-1] != eos:
        row = np.frombuffer(guide.matcher.compute_bitmask(), np.int32).copy()
        guide.finish_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size])
        assert len(allowed), guide.problem
        tokens.append(int(rng.choice(allowed)))
        guide.advance(tokens[-1])
    return tokens[1:-1]


@pytest.mark.parametrize("make", MAKES)
def test_text_of_any_tokenizer_follows_the_document(tmp_path: Path, make: str) -> None:
    raw = MAKES[make]()
    if make != "bytes":
        raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    raw.save(str(tmp_path / "tokenizer.json"))
    size, eos = raw.get_vocab_size() + 5, raw.token_to_id("<|end|>" if make == "bytes" else "</s>")
    source = model_source([str(tmp_path)], size)
    for seed in range(4):
        guide = Compiler(4).guide(Document("regex", PATTERN), b"", source, (eos,), [])
        text = raw.decode([*raw.encode("a").ids, *walk(guide, size, eos, seed)])
        assert re.fullmatch("a" + PATTERN, text), text
    assert len({raw.token_to_id(text) for text in CONTROL} & source.control) == (0 if make == "bytes" else 3)


def test_the_tokenizer_inside_a_gguf_file(tmp_path: Path) -> None:
    path = demo_model.fetch()
    source = model_source([str(tmp_path), str(path)], 49152)  # the directory has none
    guide = Compiler(4).guide(Document("regex", r"\p{L}{3,20} \d{5}, ü香"), b"", source, (2,), [])
    text = load_tokenizer(path).decode(walk(guide, 49152, 2))
    assert re.fullmatch(r"[^\W\d_]{3,20} \d{5}, ü香", text), text


def test_entries_of_a_gguf_file_whose_text_cannot_be_cut_here(tmp_path: Path) -> None:
    """SentencePiece, as in GGUF files of Llama 2, Mistral or Phi-3; decoded by the same tokenizer."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(ENTRIES)
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    writer.add_token_types(kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    size, raw = len(ENTRIES) + 5, step_by_step()
    source = model_source([str(tmp_path / "m.gguf")], size)
    assert source.control == {0, 1, 2}
    for seed in range(4):
        guide = Compiler(4).guide(Document("regex", PATTERN), b"", source, (2,), [])
        text = raw.decode([raw.token_to_id("a"), *walk(guide, size, 2, seed)])
        assert re.fullmatch("a" + PATTERN, text), text
    with pytest.raises(GuideError, match="the model 20"):
        model_source([str(tmp_path / "m.gguf")], 20)


def test_a_tokenizer_that_no_document_can_be_compiled_for_says_so(tmp_path: Path) -> None:
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "</s>": 1, "a": 2, "##b": 3}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(GuideError, match="decoder"):
        Compiler(4).guide(Document("regex", "ab"), b"", model_source([str(tmp_path)], 9), (1,), [])
    with pytest.raises(GuideError, match="the model 3"):
        model_source([str(tmp_path)], 3)
