"""Bad, huge and pathological documents fail alone and say why; compiled ones are kept, boundedly."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus.errors import FleetError
from allspark_bus.response_format import Document
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.engine.types import ModelFacts
from allspark_workers.guided import compiler
from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.guides import Guides
from allspark_workers.guided.trial import Trials

from tests.guided.conftest import EngineMaker, config

DEEP = '{"type":"array","items":' * 500 + "{}" + "}" * 500
ANY = [[{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(8)] for i in range(8)]
PRODUCT = json.dumps({"allOf": [{"anyOf": options} for options in ANY]})
BAD = {
    "schema of an unknown type": (config(type="json_schema", json_schema='{"type":"objekt"}'), "objekt"),
    "schema that nothing satisfies": (
        config(type="json_schema", json_schema='{"type":"string","minLength":5,"maxLength":3}'),
        "minLength",
    ),
    "schema with a keyword that is not enforced": (
        config(type="json_schema", json_schema='{"type":"array","uniqueItems":true}'),
        "uniqueItems",
    ),
    "schema elsewhere": (config(type="json_schema", json_schema='{"$ref":"file:///etc/passwd"}'), "retriev"),
    "schema that refers to itself": (config(type="json_schema", json_schema='{"$ref":"#"}'), "no token"),
    "schema nested deeply": (config(type="json_schema", json_schema=DEEP), "recursion"),
    "schema of 8^8 cases": (config(type="json_schema", json_schema=PRODUCT), "too large"),
    "open group": (config(type="regex", regex="(a"), "unclosed group"),
    "look-ahead": (config(type="regex", regex="(?=a)b"), "look-around"),
    "back-reference": (config(type="regex", regex=r"(a)\1"), "backreferences"),
    "regex that matches nothing": (config(type="regex", regex=r"[^\s\S]"), "no token"),
    "undefined rule": (config(type="grammar", grammar="start: foo"), "foo"),
    "no grammar at all": (config(type="grammar", grammar="hello"), "grammar"),
    "brackets": (config(type="grammar", grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000), "nested"),
    "more bytes than the limit": (config(type="regex", regex="a" * 50_001), "50001 bytes"),
    "vocabulary that cannot spell it": (
        config(vocab={"b": 5, "c": 6}, vocab_type=pb.VOCAB_TYPE_BPE, type="regex", regex="a"),
        "no token of the vocabulary",
    ),
}


@pytest.fixture
async def guides() -> AsyncIterator[Guides]:
    made = Guides(max_bytes=50_000, cpu_s=1.0, max_documents=2)
    yield made
    await made.close()


@pytest.fixture
def facts(make_engine: EngineMaker) -> ModelFacts:
    return make_engine().facts


async def test_a_bad_document_is_refused_with_its_reason(guides: Guides, facts: ModelFacts) -> None:
    for name, (bad, reason) in BAD.items():
        with pytest.raises(GuideError) as e:
            await guides.prepare(bad, facts, [])
        assert reason in str(e.value), name
        assert len(str(e.value)) < 500 and "\n" not in str(e.value), name
    assert await guides.prepare(config(type="regex", regex="fine"), facts, []) is not None


async def test_a_document_that_compiles_for_ever_or_takes_all_memory_dies_in_a_child(
    guides: Guides, facts: ModelFacts
) -> None:
    """Divisibility by ten million is an automaton of ten million states; the library does not bound it."""
    started = time.monotonic()
    neighbour = asyncio.create_task(guides.prepare(config(type="regex", regex="[ab]+"), facts, []))
    with pytest.raises(GuideError, match="simplify it"):
        schema = '{"type":"integer","multipleOf":9999991}'
        await guides.prepare(config(type="json_schema", json_schema=schema), facts, [])
    assert await neighbour is not None
    print(f"{time.monotonic() - started:.1f} s")


async def test_cpu_time_is_bounded() -> None:
    trials = Trials(cpu_s=0.2, memory_bytes=4 << 30)
    try:
        with pytest.raises(GuideError, match=r"more than 0\.2 s of CPU time"):
            await trials.check(Document("json_schema", '{"type":"integer","multipleOf":9999991}'))
        await trials.check(Document("regex", "a"))
    finally:
        await trials.close()


async def test_compiled_documents_are_kept_by_vocabulary_ends_and_text(
    guides: Guides, facts: ModelFacts
) -> None:
    letters = {char: 10 + index for index, char in enumerate("abcdef")}
    a = config(type="regex", regex="a+")
    for wanted, compiled in [
        (a, 1),
        (a, 1),
        (config(eos=2, type="regex", regex="a+"), 2),  # another end
        (a, 2),
        (config(type="regex", regex="a*"), 3),  # another text, and the two others were used last
        (config(eos=2, type="regex", regex="a+"), 4),  # the one that was used longest ago is gone
        (config(vocab=letters, type="regex", regex="a+"), 5),
        (config(vocab=letters, vocab_type=pb.VOCAB_TYPE_SPM, type="regex", regex="a+"), 6),
    ]:
        await guides.prepare(wanted, facts, [])
        assert guides.compiler.num_compiled == compiled


async def test_vocabularies_are_kept_boundedly(guides: Guides, facts: ModelFacts) -> None:
    for index in range(compiler.MAX_SOURCES + 3):
        vocab = {"a": 5, "b": 6 + index}
        guide = await guides.prepare(config(vocab=vocab, type="regex", regex="ab"), facts, [5, 6 + index])
        assert guide is not None and not guide.problem
    assert len(guides.compiler._sources) == compiler.MAX_SOURCES


async def test_a_model_without_a_tokenizer_needs_the_requests_vocabulary(
    guides: Guides, make_engine: EngineMaker, tmp_path: Path
) -> None:
    engine = make_engine()
    bare = dataclasses.replace(engine.facts, tokenizer_paths=(str(tmp_path),))
    with pytest.raises(GuideError, match="send its entries as vocab"):
        await guides.prepare(config(type="json_object"), bare, [])
    vocab = {char: 5 + index for index, char in enumerate('{}":,ab')}
    assert await guides.prepare(config(vocab=vocab, type="json_object"), bare, []) is not None


async def test_tokens_that_do_not_follow_the_document_are_refused(guides: Guides, facts: ModelFacts) -> None:
    with pytest.raises(GuideError, match="do not follow the document"):
        await guides.prepare(config(type="regex", regex="a+"), facts, [4 + ord("b") - 32])


async def test_a_request_without_a_document_has_no_guide(guides: Guides, facts: ModelFacts) -> None:
    for free in (pb.GenerateConfig(), config(type=""), config(type="text"), config(vocab={"a": 1})):
        assert await guides.prepare(free, facts, []) is None
    with pytest.raises(FleetError, match="unknown type"):
        await guides.prepare(config(type="yaml"), facts, [])
