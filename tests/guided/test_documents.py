"""What a guided engine generates is what the request asked for, by independent judges of JSON and regexes."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from allspark_workers.engine.engine import Engine
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from tests.engine.engine_helpers import Collected, run_all
from tests.guided.conftest import EOS, PROMPT, EngineMaker, Guided, config, guided_request, guides_of

SEEDS = range(4)
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer", "minimum": -5, "maximum": 70}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "enums and constants": {"enum": ["red", "grün", "日本", 3, None, True, {"a": [1]}]},
    "nested objects": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "inner": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "none": {"type": "null"}},
                "required": ["on", "none"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "inner"],
        "additionalProperties": False,
    },
    "arrays": {
        "type": "array",
        "minItems": 2,
        "maxItems": 4,
        "items": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{2,3}$"}]},
    },
    "numbers": {
        "type": "object",
        "properties": {
            "i": {"type": "integer", "minimum": 10, "maximum": 250},
            "m": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
            "x": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        },
        "required": ["i", "m", "x"],
        "additionalProperties": False,
    },
    "unicode": {
        "type": "object",
        "properties": {"ключ 日本": {"const": "ü\n\"é'"}},
        "required": ["ключ 日本"],
        "additionalProperties": False,
    },
    "a recursive definition": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "formats": {"type": "string", "format": "date"},
}
REGEXES = [
    r"[a-z]{3,8}",
    r"(ja|nein), [0-9]{1,4}\.",
    r"\p{Lu}\p{Ll}{2,5} ü?日本",
    r"\d{4}-(0[1-9]|1[0-2])",
    "x?",
]
LARK = 'start: greeting " " NAME ("!" | "?")\ngreeting: "hello" | "good day"\nNAME: /[A-Z][a-z]{1,6}/'
GBNF = 'root ::= term ("+" term)* "="\nterm ::= [0-9] | "(" term "-" term ")"'


def run(engine: Engine, guide_configs: list[Any], **fields: Any) -> Collected:
    """One request for every configuration and seed, all together."""
    guides = guides_of(engine, [c for c in guide_configs for _ in SEEDS])
    requests = [
        guided_request(f"{index}", guide, seed=index, temperature=0.8, **fields)
        for index, guide in enumerate(guides)
    ]
    return run_all(engine, requests)


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_of_a_schema_parses_and_validates(make_engine: EngineMaker, tiny: Guided, name: str) -> None:
    schema = SCHEMAS[name]
    result = run(make_engine(), [config(type="json_schema", json_schema=json.dumps(schema))], new=400)
    texts = set()
    for key, tokens in result.tokens.items():
        if name == "a recursive definition" and result.finish(key) == "length":
            continue  # it has no bound
        texts.add(tiny.decode(tokens))
        assert result.finish(key) == "eos", result.ends[key]
        assert tokens[-1] == EOS
        jsonschema.validate(
            json.loads(tiny.decode(tokens)), schema, format_checker=jsonschema.FormatChecker(["date"])
        )
    print(texts)
    assert len(texts) > 1


def test_json_object_without_a_schema_is_an_object(make_engine: EngineMaker, tiny: Guided) -> None:
    # The bound on the properties ends it soon; the second request is plain json_object, cut by its length.
    small = {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "boolean"}}
    kinds = [config(type="json_object", json_schema=json.dumps(small)), config(type="json_object")]
    result = run(make_engine(), kinds, new=120)
    for index, key in enumerate(map(str, range(2 * len(SEEDS)))):
        text = tiny.decode(result.tokens[key])
        assert text.startswith("{")
        if result.finish(key) == "eos":
            assert isinstance(json.loads(text), dict)
        assert index >= len(SEEDS) or result.finish(key) in ("eos", "length")


@pytest.mark.parametrize("pattern", REGEXES)
def test_text_of_a_regex_matches_as_a_whole(make_engine: EngineMaker, tiny: Guided, pattern: str) -> None:
    result = run(make_engine(), [config(type="regex", regex=pattern)])
    python = pattern.replace(r"\p{Lu}", "[^\\W\\d_]").replace(r"\p{Ll}", "[^\\W\\d_]")
    for key, tokens in result.tokens.items():
        text = tiny.decode(tokens)
        assert result.finish(key) == "eos"
        assert re.fullmatch(python, text), text
        if r"\p{Lu}" in pattern:
            assert text[0].isupper() and text[1:3].islower()


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [(LARK, r"(hello|good day) [A-Z][a-z]{1,6}[!?]"), (GBNF, r"[-+()0-9]+=")],
    ids=["Lark", "GBNF"],
)
def test_text_of_a_grammar(make_engine: EngineMaker, tiny: Guided, grammar: str, pattern: str) -> None:
    result = run(make_engine(), [config(type="grammar", grammar=grammar)])
    for key, tokens in result.tokens.items():
        text = tiny.decode(tokens)
        if result.finish(key) == "length":
            continue  # the GBNF has no bound
        assert re.fullmatch(pattern, text), text
        if grammar == GBNF:
            assert isinstance(eval(text[:-1], {}), int)  # the text is digits, brackets and operators only
    assert "eos" in {result.finish(key) for key in result.ends}


def test_greedy_tokens_are_the_likeliest_that_the_librarys_matcher_allows(
    make_engine: EngineMaker, tiny: Guided
) -> None:
    """transformers' logits, a matcher of our own making: the mask is applied where spec 2.5.2 has it."""
    pattern = r"(\p{Lu}\p{Ll}{2,9}[ 日]){12}\d{20}"
    engine = make_engine()
    (guide,) = guides_of(engine, [config(type="regex", regex=pattern)])
    tokens = run_all(engine, [guided_request("g", guide, do_sample=False)]).tokens["g"]
    size = tiny.reference.config.vocab_size
    library = LLTokenizer((tiny.path / "tokenizer.json").read_text(), n_vocab=size, eos_token=EOS)
    matcher = LLMatcher(library, LLMatcher.grammar_from_regex(pattern))
    with torch.inference_mode():
        logits = tiny.reference(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].numpy()
    mask = np.zeros((1, (size + 31) // 32), np.int32)
    for position, token in enumerate(tokens):
        fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])
        assert token == allowed[logits[position][allowed].argmax()], position
        assert matcher.consume_token(token)
    assert len(tokens) > 50 and tokens[-1] == EOS
