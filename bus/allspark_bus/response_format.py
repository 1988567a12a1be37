"""GenerateConfig.response_format and vocab: which document is asked for, and what a legal message looks like.

Broker (admission) and worker (compilation) read the map with the same code. Pure functions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from allspark_proto import allspark_service_pb2 as pb

from allspark_bus.errors import LimitError, ParamError

#: Longest schema, regular expression or grammar that is admitted; a worker may have a lower limit.
MAX_DOCUMENT_BYTES: Final = 1 << 20
#: A vocabulary of 150,000 entries has 2 to 4 MiB.
MAX_VOCAB_BYTES: Final = 16 << 20
MAX_ENTRY_CHARS: Final = 256

Kind = Literal["json_schema", "regex", "grammar"]
_ANY_OBJECT: Final = '{"type":"object"}'
#: type -> key that holds its text; the types that upstream does not know are ours.
_KEY_OF_TYPE: Final[Mapping[str, Kind]] = {
    "json_object": "json_schema",
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
}
#: Types that switch nothing on.
_OFF: Final = ("", "text")


@dataclass(frozen=True, slots=True)
class Document:
    """What the whole generated text has to be: JSON of a schema, a match of a regex, a word of a grammar."""

    kind: Kind
    text: str


def document(response_format: Mapping[str, str]) -> Document | None:
    """The document that a request asks for; None: generation is free.

    Raises ParamError for a type, a key or a combination that means nothing, LimitError for too long a text.
    """
    fields = dict(response_format)
    kind = fields.pop("type", "")
    if kind in _OFF:
        if fields:
            raise ParamError(
                f"response_format has {', '.join(sorted(fields))}, but its type {kind!r} uses none of them; "
                f"known types: {', '.join(_KEY_OF_TYPE)}"
            )
        return None
    if kind not in _KEY_OF_TYPE:
        known = ", ".join(_KEY_OF_TYPE)
        raise ParamError(f"response_format has the unknown type {kind[:100]!r}; known types: {known}, text")
    key = _KEY_OF_TYPE[kind]
    text = fields.pop(key, _ANY_OBJECT if kind == "json_object" else None)
    if fields:
        raise ParamError(
            f"response_format has keys that type {kind!r} does not use: {', '.join(sorted(fields))[:200]}"
        )
    if text is None:
        raise ParamError(f"response_format of type {kind!r} needs the key {key!r}")
    size = len(text.encode())
    if size > MAX_DOCUMENT_BYTES:
        raise LimitError(f"response_format: {key} has {size} bytes, the limit is {MAX_DOCUMENT_BYTES}")
    return Document(key, text)


def document_of(kind: str, text: str) -> Document:
    """The document of a kind, as another process names it. Raises ParamError for an unknown kind."""
    for known in _KEY_OF_TYPE.values():
        if known == kind:
            return Document(known, text)
    raise ParamError(f"{kind[:100]!r} is no kind of document")


def check(config: pb.GenerateConfig, vocab_size: int) -> Document | None:
    """What `document` returns, after everything was checked that needs no grammar compiler.

    Raises ParamError or LimitError.
    """
    if config.vocab and config.ByteSize() > MAX_VOCAB_BYTES:
        raise LimitError(f"vocab: the request has {config.ByteSize()} bytes, the limit is {MAX_VOCAB_BYTES}")
    wanted = document(config.response_format)
    if wanted is None:
        return None
    if config.num_beams > 1:
        raise ParamError("response_format cannot be combined with num_beams over 1: beams have no guide yet")
    if wanted.kind == "json_schema":
        _check_schema(wanted.text)
    elif not wanted.text:
        raise ParamError(f"response_format: {wanted.kind} is empty")
    if config.vocab:
        _check_vocab(config, vocab_size)
    return wanted


def _check_vocab(config: pb.GenerateConfig, vocab_size: int) -> None:
    vocab = config.vocab
    if config.vocab_type not in pb.VocabType.values():
        raise ParamError(f"vocab_type {config.vocab_type} is unknown; use one of {pb.VocabType.keys()}")
    ids = np.fromiter(vocab.values(), np.int64, len(vocab))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ParamError(f"vocab: id {wrong} is outside the model's vocabulary [0, {vocab_size})")
    if len(np.unique(ids)) != len(ids):
        raise ParamError("vocab: two entries have the same id")
    if max(map(len, vocab)) > MAX_ENTRY_CHARS:
        raise LimitError(f"vocab: an entry has more than {MAX_ENTRY_CHARS} characters")


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise ParamError(f"response_format: json_schema is not JSON: {error}") from error
    except RecursionError as error:
        raise ParamError("response_format: json_schema is nested too deeply") from error
    if not isinstance(schema, dict | bool):
        raise ParamError("response_format: a JSON schema is an object, true or false")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
