"""Run as ``python -m allspark_workers.guided.trial_child CPU_S BYTES``: compiles documents at its own risk.

Work is ``{"kind": ..., "text": ...}``, its answer ``{"problem": ""}`` or the reason (see ``child``).
"""

from __future__ import annotations

import sys
from typing import Any

from allspark_bus.response_format import Document
from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from allspark_workers import child
from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.grammar import new_matcher


class _Bytes(TokenizerWrapper):
    """The smallest vocabulary that can spell everything: what a grammar costs shows with it as well."""

    def __init__(self) -> None:
        self.tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = 256, None, [256]
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def problem_of(tokenizer: LLTokenizer, request: dict[str, Any]) -> str:
    """Why the document cannot be compiled; empty if it can."""
    try:
        new_matcher(tokenizer, Document(request["kind"], request["text"]))
    except GuideError as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
        return f"{request['kind']}: the grammar library failed: {error!r}"
    return ""


def main(arguments: list[str]) -> None:
    """Serves standard input and output."""
    tokenizer = LLTokenizer(_Bytes())
    problem_of(tokenizer, {"kind": "json_schema", "text": '{"type":"object"}'})  # its memory is no document's
    child.main(lambda work: {"problem": problem_of(tokenizer, work)}, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
