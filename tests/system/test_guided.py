"""Guided decoding through gateways, broker and two workers, on the real model."""

import asyncio
import json
import re
from pathlib import Path

import jsonschema
import pytest
from allspark.client import AsyncClient, Client, GenerateOptions, RequestInterrupted, StatusError
from allspark.launcher import Fleet
from allspark.text import Tokenizer, load_tokenizer
from allspark_proto import allspark_service_pb2 as pb
from tokenizers import Tokenizer as RawTokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 15}, "zip": {"type": ["string", "null"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "languages": {
            "type": "array",
            "items": {"enum": ["English", "Français", "日本語"]},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["name", "age", "home", "languages"],
    "additionalProperties": False,
}
VERDICT = {"enum": ["yes", "no", "größtenteils"]}
WEATHER = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"day": {"enum": ["Mon", "Tue"]}, "celsius": {"type": "number", "multipleOf": 0.5}},
        "required": ["day", "celsius"],
        "additionalProperties": False,
    },
    "minItems": 2,
    "maxItems": 2,
}
SCHEMAS = {
    "Describe the person Alice Smith from Paris as JSON.": PERSON,
    "Is the sky blue?": VERDICT,
    "Give the weather of two days as JSON.": WEATHER,
}
REGEX = r"(yes|no), because [a-z ]{5,40}\."
GRAMMAR = 'root ::= "I like " thing (" and " thing)? "."\nthing ::= "cats" | "dogs" | "größere Katzen"'


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


def ask(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": question}])


def guided(tokenizer: Tokenizer, seed: int = 0, **response_format: str) -> GenerateOptions:
    return GenerateOptions(
        max_new_tokens=120, eos_token_id=tokenizer.eos_ids[0], do_sample=seed > 0, temperature=0.7, seed=seed,
        response_format=response_format,
    )  # fmt: skip


def orders(tokenizer: Tokenizer) -> list[tuple[list[int], GenerateOptions]]:
    """Every schema greedily and sampled, a regex, a grammar, and a free request."""
    made = []
    for seed in (0, 1):
        for question, schema in SCHEMAS.items():
            text = json.dumps(schema)
            kind = "json_object" if seed else "json_schema"
            made.append((ask(tokenizer, question), guided(tokenizer, seed, type=kind, json_schema=text)))
    made.append((ask(tokenizer, "Is water wet?"), guided(tokenizer, type="regex", regex=REGEX)))
    made.append((ask(tokenizer, "What do you like?"), guided(tokenizer, type="grammar", grammar=GRAMMAR)))
    made.append((ask(tokenizer, "Who are you?"), guided(tokenizer)))
    return made


async def run_all(fleet: Fleet, tokenizer: Tokenizer, *, kills: bool) -> list[list[int]]:
    async with AsyncClient(fleet.addresses) as client:
        requests = [await client.submit("smollm2", *order) for order in orders(tokenizer)]
        first = requests[0].stream()
        head = list(await anext(first))
        if kills:
            fleet.workers[0].kill()
        tail = [token async for tokens in first for token in tokens]
        results = [head + tail, *await asyncio.gather(*[r.result() for r in requests[1:]])]
        assert {r.finish_reason for r in requests} <= {"eos", "length"}
        for r in requests:
            await r.release()
    return results


async def test_answers_follow_their_documents_even_if_a_worker_dies_in_the_middle(
    real_fleet: Fleet, tokenizer: Tokenizer
) -> None:
    quiet = await run_all(real_fleet, tokenizer, kills=False)
    texts = [tokenizer.decode(tokens) for tokens in quiet]
    print(texts)
    for text, schema in zip(texts, [*SCHEMAS.values()] * 2, strict=False):
        jsonschema.validate(json.loads(text), schema)
    assert re.fullmatch(REGEX, texts[-3])
    assert re.fullmatch("I like (cats|dogs|größere Katzen)( and (cats|dogs|größere Katzen))?\\.", texts[-2])
    assert await run_all(real_fleet, tokenizer, kills=True) == quiet
    real_fleet.workers[0].wait_ready(300)


def test_a_bad_document_fails_alone_at_admission(real_fleet: Fleet, tokenizer: Tokenizer) -> None:
    prompt = ask(tokenizer, "Hello!")
    with Client(real_fleet.addresses) as client:
        neighbour = client.submit("smollm2", prompt, guided(tokenizer, type="regex", regex="[a-z ]{40}"))
        for bad, reason in [
            ({"type": "json_schema", "json_schema": "{"}, "not JSON"),
            ({"type": "json_schema", "json_schema": '{"type":"objekt"}'}, "objekt"),
            ({"type": "json_schema", "json_schema": '{"type":"integer","multipleOf":9999991}'}, "simplify"),
            ({"type": "regex", "regex": "(a"}, "unclosed group"),
        ]:
            # Refused; or interrupted, where compiling it took a busy worker longer than the broker waits.
            with (
                pytest.raises((StatusError, RequestInterrupted)) as ended,
                client.submit("smollm2", prompt, guided(tokenizer, **bad)) as request,
            ):
                request.result()
            assert reason in ended.value.reason
            if isinstance(ended.value, StatusError):
                assert ended.value.status == pb.ALLSPARK_PARAM_ERROR
            else:
                assert ended.value.finish_reason == "grammar"
        assert re.fullmatch("[a-z ]{40}", tokenizer.decode(neighbour.result()))
        neighbour.release()


def test_a_vocabulary_of_49152_entries_travels_with_its_request(
    real_fleet: Fleet, tokenizer: Tokenizer
) -> None:
    raw = RawTokenizer.from_str(tokenizer.to_json())
    options = GenerateOptions(
        max_new_tokens=40,
        eos_token_id=tokenizer.eos_ids[0],
        response_format={"type": "json_object", "json_schema": json.dumps(VERDICT)},
        vocab=raw.get_vocab(with_added_tokens=True),
        vocab_type=pb.VOCAB_TYPE_BPE,
    )
    with (
        Client(real_fleet.addresses) as client,
        client.submit("smollm2", ask(tokenizer, "Is it?"), options) as request,
    ):
        jsonschema.validate(json.loads(tokenizer.decode(request.result())), VERDICT)
        assert request.finish_reason == "eos"
