"""A tiny random model with a byte-level tokenizer of its own: every document is walked through at random."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import EngineRequest, GenerationParams, ModelConfig
from allspark_workers.guided.guide import Guide
from allspark_workers.guided.guides import Guides
from allspark_workers.models.loader import load_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

EOS = 1
PIECES = [
    '": "',
    '", "',
    '{"',
    '"}',
    "name",
    "true",
    "false",
    "null",
    "ab",
    "the ",
    "é",
    "日本",
    "12",
    "  ",
    "00",
]
PROMPT = (5, 6, 7, 8)


def make_tokenizer() -> Tokenizer:
    """Control tokens 0 to 3, every byte, and some longer pieces with the merges that build them."""
    char = bytes_to_unicode()
    entries = ["<|pad|>", "<|end|>", "<|user|>", "<|stop|>", *(char[value] for value in range(256))]
    merges: list[tuple[str, str]] = []
    for piece in PIECES:
        symbols = [char[value] for value in piece.encode()]
        left = symbols[0]
        for right in symbols[1:]:
            if left + right not in entries:
                entries.append(left + right)
                merges.append((left, right))
            left += right
    raw = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in entries[:4]])
    return raw


class Guided(NamedTuple):
    """A model, its tokenizer, and what turns requests into guides."""

    path: Path
    tokenizer: Tokenizer
    reference: Any

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, without control tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Guided:
    path = tmp_path_factory.mktemp("guided")
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    # More ids than the tokenizer has, as in models whose embeddings are padded.
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 13, hidden_size=64, intermediate_size=80,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=640,
        eos_token_id=EOS, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(path)
    return Guided(path, tokenizer, model)


EngineMaker = Callable[..., Engine]


@pytest.fixture
def make_engine(tiny: Guided) -> Iterator[EngineMaker]:
    engines: list[Engine] = []

    def make(**config: Any) -> Engine:
        settings = ModelConfig(str(tiny.path), **({"num_threads": 1, "dtype": "fp32"} | config))
        engine = Engine(load_model(settings), settings)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.check()
        engine.stop()


def config(*, eos: int = EOS, vocab: dict[str, int] | None = None, **fields: Any) -> pb.GenerateConfig:
    """A request's configuration; what is not a field of it goes into response_format."""
    message = pb.GenerateConfig(eos_token_id=eos, vocab=vocab or {}, vocab_type=fields.pop("vocab_type", 0))
    for word in fields.pop("stop_words", []):
        message.stop_words_ids.ids.add(word=word)
    message.response_format.update(fields)
    return message


def guides_of(
    engine: Engine, configs: list[pb.GenerateConfig], generated: list[list[int]] | None = None
) -> list[Guide | None]:
    """What a worker prepares for these requests, one after another."""

    async def prepare() -> list[Guide | None]:
        guides = Guides(max_bytes=1 << 18, cpu_s=2.0, max_documents=16)
        try:
            known = generated or [[] for _ in configs]
            return [await guides.prepare(c, engine.facts, g) for c, g in zip(configs, known, strict=True)]
        finally:
            await guides.close()

    return asyncio.run(prepare())


def guided_request(name: str, guide: Guide | None, new: int = 200, **fields: Any) -> EngineRequest:
    """A sampled request after PROMPT."""
    own = {k: fields.pop(k) for k in ("generated", "priority", "arrival_s") if k in fields}
    prompt = np.asarray(fields.pop("prompt", PROMPT), np.int64)
    fields = {"eos_token_id": EOS, "early_stopping": True, "do_sample": True, "seed": 1} | fields
    params = GenerationParams(max_length=len(prompt) + new, **fields)
    return EngineRequest(name, 1, prompt, params, guide=guide, **own)
