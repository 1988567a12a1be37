"""Run as ``python -m allspark_workers.guided.trial_child CPU_S BYTES``: compiles documents at its own risk.

Standard input and output carry frames: four bytes of length, big endian, and JSON. A request is
``{"kind": ..., "text": ...}``, its answer ``{"problem": ""}`` or the reason. A document that takes more than
CPU_S seconds of CPU time, or more than BYTES of memory, kills this process and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from allspark_bus.response_format import Document
from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.grammar import new_matcher

_LENGTH_BYTES = 4


class _Bytes(TokenizerWrapper):
    """The smallest vocabulary that can spell everything: what a grammar costs shows with it as well."""

    def __init__(self) -> None:
        self.tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = 256, None, [256]
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def problem_of(tokenizer: LLTokenizer, request: dict[str, str]) -> str:
    """Why the document cannot be compiled; empty if it can."""
    try:
        new_matcher(tokenizer, Document(request["kind"], request["text"]))  # type: ignore[arg-type]
    except GuideError as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
        return f"{request['kind']}: the grammar library failed: {error!r}"
    return ""


def _allow(cpu_s: float) -> None:
    """The kernel ends this process when the next `cpu_s` seconds of computing are used up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _bound_memory(extra_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(read: Callable[[int], bytes], write: Callable[[bytes], object], cpu_s: float, room: int) -> None:
    """Answers until the input ends."""
    tokenizer = LLTokenizer(_Bytes())
    problem_of(tokenizer, {"kind": "json_schema", "text": '{"type":"object"}'})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dying is its job
    _bound_memory(room)
    while len(head := read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        _allow(cpu_s)
        answer = {"problem": problem_of(tokenizer, json.loads(read(int.from_bytes(head, "big"))))}
        data = json.dumps(answer).encode()
        write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def main(arguments: list[str]) -> None:
    """Serves standard input and output."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the library prints must not get between the frames
    serve(sys.stdin.buffer.read, out.write, float(arguments[0]), int(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
