"""Section 2.5.7: guided decoding."""

import json
from pathlib import Path
from typing import Any

from allspark.text import load_tokenizer
from allspark_proto import allspark_service_pb2 as pb

from tests.conformance import oracle
from tests.conformance.server import INTERRUPTED, OK, PARAM, Request, Server, request
from tests.conformance.suite import case

C = "GenerateConfig."
PROMPT = [5, 9, 6, 5, 9, 7, 5]
NEW = 24
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GUIDED = {"type": "json_object", "json_schema": json.dumps(SCHEMA)}


def _guided(s: Server, response_format: dict[str, str], **config: Any) -> list[int]:
    eos = oracle.reference(s.reference_path).config.eos_token_id
    live = s.start(PROMPT, new=200, eos_token_id=eos, early_stopping=True, response_format=response_format,
                   **config)  # fmt: skip
    tokens = live.take_all()
    return tokens[:-1] if tokens[-1] == eos else tokens


def _check_json(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"a", "b"} and value["a"] in ("x", "yz") and isinstance(value["b"], bool)


@case("2.5.7", C + "response_format")
def json_schema_is_obeyed(s: Server) -> None:
    decode = load_tokenizer(Path(s.reference_path)).decode
    for sampling in ({}, {"do_sample": True, "temperature": 2.0, "seed": 3}):
        _check_json(decode(_guided(s, GUIDED, **sampling)))
    _check_json(decode(_guided(s, GUIDED | {"type": "json_schema"})))


@case("2.5.7", C + "response_format", "StartRequestResponse.as_status")
def a_schema_that_is_none_or_cannot_be_enforced_2(s: Server) -> None:
    """A server that is too busy to compile it in time may take it, and then interrupts it: once more then."""
    for schema in ('{"type": "objekt"}', '{"type": "array", "uniqueItems": true}'):
        wanted = {"type": "json_object", "json_schema": schema}
        for _ in range(20):
            message = request(s.main, PROMPT, response_format=wanted)
            status = int(s.answer("StartRequest", message).as_status)
            if status != OK:
                break
            live = Request(s, s.main, message.config.uuid)
            assert (live.sync(), live.status(), live.release()) == (OK, INTERRUPTED, OK)
        assert status == PARAM


@case("2.5.7", C + "response_format")
def text_or_nothing_is_off(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    for response_format in ({}, {"type": ""}, {"type": "text"}):
        assert s.generate(PROMPT, new=NEW, response_format=response_format) == plain


@case("2.5.7", C + "vocab", C + "vocab_type", C + "response_format")
def the_vocabulary_of_a_request_is_its_own(s: Server) -> None:
    """Two vocabularies in one process, one of them with all ids turned round; both obey (1.5 #16)."""
    tokens = [chr(c) for c in range(0x20, 0x7F)]
    for shift in (0, 7):
        ids = {token: 3 + (i + shift) % len(tokens) for i, token in enumerate(tokens)}
        text = {i: token for token, i in ids.items()}
        vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | ids
        vocab = {token.replace(" ", "\u2581"): i for token, i in vocab.items()}
        found = _guided(s, GUIDED, vocab=vocab, vocab_type=pb.VOCAB_TYPE_SPM)
        _check_json("".join(text[i] for i in found))


@case("2.5.7", C + "response_format", "GenerateRequestStatus.status")
def a_dead_end_interrupts_that_request_alone(s: Server) -> None:
    """A vocabulary without a brace can never begin an object."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate("abcdefgh")}
    live = s.start(PROMPT, response_format={"type": "json_object"}, vocab=vocab, eos_token_id=2)
    assert live.sync() == OK
    assert live.status() == INTERRUPTED
    assert live.release() == OK
    assert s.generate(PROMPT) == s.generate(PROMPT)
