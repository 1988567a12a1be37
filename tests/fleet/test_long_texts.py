"""Texts of a worker: long ones do not hold up short ones, and too many ids are not sent at all."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from allspark_bus.errors import LimitError, ParamError
from allspark_proto import fleet_pb2 as fleet
from allspark_workers import texts
from allspark_workers.engine.types import ModelFacts
from allspark_workers.texts import LONG_TEXT, Texts

FACTS = ModelFacts(
    model_type="t", vocab_size=300, max_length=64, max_batch=1, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=1, span_size=16, span_bytes=1, eos_token_ids=(2,), dtype="fp32", device="cpu", weight_bytes=1,
    digest="d", tokenizer_paths=("somewhere",),
)  # fmt: skip


class Held:
    """A tokenizer that gives one id for each character, of long texts only when it is let go."""

    eos_ids: Sequence[int] = ()
    vocab_size = 300

    def __init__(self) -> None:
        self.may_go = threading.Event()

    def encode(self, text: str) -> list[int]:
        if len(text) > LONG_TEXT:
            assert self.may_go.wait(60)
            return [5]
        return [5] * len(text)


async def test_short_texts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that sends novels keeps their thread busy, and nobody else's."""
    tokenizer, here = Held(), Texts()
    monkeypatch.setattr(texts, "find_tokenizer", lambda paths: tokenizer)
    novel = fleet.Tokenize(model_name="m", text="x" * (LONG_TEXT + 1))
    novels = [asyncio.ensure_future(here.tokenize(novel, FACTS)) for _ in range(8)]
    try:
        short = await asyncio.wait_for(here.tokenize(fleet.Tokenize(text="abc"), FACTS), 30)
        assert len(short.ids) == 3 * 8
        assert not any(task.done() for task in novels)
    finally:
        tokenizer.may_go.set()
        await asyncio.gather(*novels)
        await here.close()


async def test_more_ids_than_the_model_takes_are_refused_where_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight bytes for each would be more than a broker reads from a worker: it would cut it off."""
    here = Texts()
    monkeypatch.setattr(texts, "find_tokenizer", lambda paths: Held())
    with pytest.raises(LimitError, match="63 tokens, the limit is 62"):
        await here.tokenize(fleet.Tokenize(text="x" * 63), FACTS)
    assert len((await here.tokenize(fleet.Tokenize(text="x" * 62), FACTS)).ids) == 62 * 8
    await here.close()


async def test_a_panic_of_the_library_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As pyo3 raises it: no Exception."""

    class Broken(Held):
        def encode(self, text: str) -> list[int]:
            raise Panic("index out of bounds")

    here = Texts()
    monkeypatch.setattr(texts, "find_tokenizer", lambda paths: Broken())
    with pytest.raises(ParamError, match="the tokenizer failed: index out of bounds"):
        await here.tokenize(fleet.Tokenize(text="x"), FACTS)
    await here.close()
