"""Documents are compiled once in a child process before this one touches them.

The library bounds most of what it does, but not all (a `multipleOf` of ten million builds an automaton of as
many states), and a thread cannot be stopped. A child can: it is killed by its own limits of CPU time and
memory, and by a stack overflow, and the next document gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

from allspark_bus.response_format import Document

from allspark_workers.guided.errors import GuideError

log = logging.getLogger(__name__)

_LENGTH_BYTES = 4
#: Wall-clock time after which a child is given up, beyond the CPU time: a busy machine is slow, not stuck.
_PATIENCE_S = 60.0


class Trials:
    """At most `num_children` at work; idle children stay for the next document. Event-loop thread only."""

    def __init__(self, cpu_s: float, memory_bytes: int, num_children: int = 2) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._free = asyncio.Semaphore(num_children)
        self._idle: list[Process] = []

    async def check(self, document: Document) -> None:
        """Raises GuideError if the document cannot be compiled within the limits."""
        async with self._free:
            child: Process | None = self._idle.pop() if self._idle else await self._start()
            assert child is not None
            try:
                problem = await asyncio.wait_for(_ask(child, document), self._cpu_s + _PATIENCE_S)
            except TimeoutError:
                raise GuideError(
                    f"{document.kind}: not compiled after {self._cpu_s + _PATIENCE_S:g} s"
                ) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                raise GuideError(f"{document.kind}: {self._cause(await child.wait())}") from None
            else:
                self._idle.append(child)
                child = None
            finally:
                if child is not None:
                    await _end(child)
        if problem:
            raise GuideError(problem)

    async def close(self) -> None:
        """Ends the children."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "allspark_workers.guided.trial_child",
            str(self._cpu_s), str(self._memory_bytes), stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
        )  # fmt: skip

    def _cause(self, status: int) -> str:
        if status == -signal.SIGXCPU:
            return f"compiling it takes more than {self._cpu_s:g} s of CPU time; simplify it"
        log.warning("the grammar library ended with status %d over a document", status)
        return f"compiling it takes more than {self._memory_bytes >> 20} MiB, or fails; simplify it"


async def _ask(child: Process, document: Document) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    data = json.dumps({"kind": document.kind, "text": document.text}).encode()
    child.stdin.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    await child.stdin.drain()
    length = int.from_bytes(await child.stdout.readexactly(_LENGTH_BYTES), "big")
    answer: dict[str, str] = json.loads(await child.stdout.readexactly(length))
    return answer["problem"]


async def _end(child: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()
