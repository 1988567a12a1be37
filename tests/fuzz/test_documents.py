"""Documents for guided decoding made of anything: a guide, or a reason, within the limit of CPU time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from allspark_bus import response_format
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.engine.types import ModelFacts
from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.guides import Guides
from allspark_workers.guided.vocabulary import read_gguf
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.fuzzing import FLOATS, NUMBERS, ODD, damaged_json, fuzz

SIZE, EOS = 130, 129
LIMIT_S = 2.0
FACTS = ModelFacts(
    model_type="llama", vocab_size=SIZE, max_length=64, max_batch=2, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=8, span_size=16, span_bytes=512, eos_token_ids=(EOS,), dtype="fp32",
    device="cpu", weight_bytes=1, digest="0",
)  # fmt: skip
LETTERS = {**{chr(code): code for code in range(128)}, "</s>": EOS}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[a-z]+$"},
        "size": {"type": "integer", "minimum": -3, "maximum": 12, "multipleOf": 3},
        "kinds": {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3},
        "when": {"type": "string", "format": "date-time"},
        "next": {"$ref": "#/$defs/pair"},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"pair": {"anyOf": [{"const": 1}, {"allOf": [{"type": "number"}]}, {"type": "boolean"}]}},
}
PIECES = [
    "a",
    "[^a]",
    ".",
    r"\d",
    r"\p{L}",
    r"\b",
    "(",
    ")",
    "(?:b|c)",
    "|",
    "*",
    "+",
    "?",
    "{2,3}",
    "{1000}",
]
PIECES += ["{5,2}", "[", "]", "^", "$", "\\", "(?i)", "(?=a)", "\\1", "é", "\0", "\U0001f600", r"\u{110000}"]
RULES = [
    "start: ",
    "rule",
    '"a"',
    "/[a-z]+/",
    "(",
    ")",
    "|",
    "*",
    "~3..1",
    "\n",
    "%ignore ",
    "%import common.INT",
]
RULES += [
    "%json {}",
    "rule: start",
    '"a"..."z"',
    "/(/",
    "~99999999",
    "&",
    "start[capture]: ",
    "%llguidance {}",
]


class Bench(NamedTuple):
    """A worker's guides and an event loop for them."""

    runner: asyncio.Runner
    guides: Guides

    def prepare(self, fields: dict[str, str], vocab: dict[str, int]) -> str:
        """Admission, then compilation, then the first mask, as a request has them; why it was refused."""
        config = pb.GenerateConfig(eos_token_id=EOS, vocab=vocab, response_format=fields)
        try:
            response_format.check(config, SIZE)
            guide = self.runner.run(self.guides.prepare(config, FACTS, []))
        except (FleetError, GuideError) as error:
            assert 0 < len(str(error)) < 10_000
            return str(error)
        if guide is not None:
            mask = np.frombuffer(guide.matcher.compute_bitmask(), np.int32).copy()
            guide.finish_mask(mask)
            assert guide.problem or mask.any()
        return ""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        made = Bench(runner, Guides(max_bytes=50_000, cpu_s=LIMIT_S))
        yield made
        runner.run(made.guides.close())


def test_the_documents_that_are_damaged_are_valid(bench: Bench) -> None:
    for kind, text in (
        ("json_schema", json.dumps(SCHEMA)),
        ("regex", "(?:b|c){2,3}"),
        ("grammar", 'start: rule "a"\nrule: /[a-z]+/'),
    ):
        assert bench.prepare({"type": kind, kind: text}, LETTERS) == ""


schemas = damaged_json(SCHEMA).map(lambda data: data.decode("latin-1"))
numbers = st.sampled_from([*NUMBERS, *FLOATS]) | st.integers(-40, 40)
bounds = st.dictionaries(
    st.sampled_from(["minimum", "maximum", "exclusiveMaximum", "multipleOf", "minLength", "maxItems"]),
    numbers,
).map(lambda bound: json.dumps({"type": "integer", **bound}))
regexes = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
grammars = st.lists(st.sampled_from(RULES), max_size=10).map(lambda rules: "start: " + " ".join(rules))


def a_document(kind: str, texts: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, str]]:
    return texts.map(lambda text: {"type": kind, kind: text})


documents = (
    a_document("json_schema", schemas | bounds)
    | a_document("regex", regexes)
    | a_document("grammar", grammars)
)


@fuzz(120)
@given(fields=documents)
@example(fields={"type": "json_schema", "json_schema": json.dumps(SCHEMA)})
@example(fields={"type": "json_schema", "json_schema": "[" * 50_000})
@example(fields={"type": "regex", "regex": "(" * 20_000})
@example(fields={"type": "regex", "regex": "((a{0,99}){0,99}){0,99}"})
@example(fields={"type": "grammar", "grammar": "start: start start | start"})
def test_a_document_gives_a_guide_or_a_reason(fields: dict[str, str], bench: Bench) -> None:
    bench.prepare(fields, LETTERS)


keys = st.sampled_from(["type", "json_schema", "regex", "grammar", "schema", "", "\0"])
texts = st.sampled_from(
    ["", "text", "json_object", "json_schema", "regex", "grammar", "{}", "true", "x" * 2000]
)


@fuzz(120)
@given(
    fields=st.dictionaries(keys, texts, max_size=3),
    vocab=st.dictionaries(
        st.sampled_from(
            ["", "a", "{", "\0", "<s>", "</s>", "<0x41>", "<0xFF>", "\u2581", "é" * 256, "x" * 257]
        ),
        st.integers(-1, SIZE),
        max_size=6,
    ),
)
def test_fields_and_vocabularies_of_any_kind(
    fields: dict[str, str], vocab: dict[str, int], bench: Bench
) -> None:
    bench.prepare(fields, vocab)


@fuzz(200)
@given(tokens=st.sampled_from(ODD), kinds=st.sampled_from(ODD))
@example(tokens=7, kinds=None)
@example(tokens=["a"], kinds=3)
@example(tokens=[1], kinds=[1])
def test_the_vocabulary_of_a_header_is_read_or_refused(tokens: Any, kinds: Any) -> None:
    header = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    try:
        vocabulary = read_gguf(header, SIZE)
    except GuideError as error:
        assert str(error)
    else:
        assert len(vocabulary.tokens) == SIZE
