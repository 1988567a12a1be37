"""Child processes for work that nothing inside a process can bound in time and memory.

A library or a template may compute for ever, and a thread cannot be stopped. A child can: it is killed by its
own limits of CPU time and memory (`child`), and by a stack overflow, and the next piece of work gets a new
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from typing import Any

from allspark_workers.child import LENGTH_BYTES

log = logging.getLogger(__name__)

#: Wall-clock time after which a child is given up, beyond the CPU time: a busy machine is slow, not stuck.
_PATIENCE_S = 60.0


class ChildLost(Exception):
    """The child did not survive its work; the text says which limit ended it ("takes more than ...")."""


class Children:
    """At most `num_children` at work on `module`, a main module that calls `child.main`.

    `cpu_s` and `memory_bytes` are for one piece of work. Idle children stay for the next one.
    Event-loop thread only.
    """

    def __init__(self, module: str, cpu_s: float, memory_bytes: int, num_children: int = 2) -> None:
        self._module = module
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._free = asyncio.Semaphore(num_children)
        self._idle: list[Process] = []

    async def ask(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer, both JSON objects. Raises ChildLost."""
        async with self._free:
            child: Process | None = self._idle.pop() if self._idle else await self._start()
            assert child is not None
            try:
                answer = await asyncio.wait_for(_exchange(child, work), self._cpu_s + _PATIENCE_S)
            except TimeoutError:
                raise ChildLost(f"takes more than {self._cpu_s + _PATIENCE_S:g} s") from None
            except (asyncio.IncompleteReadError, ConnectionError):
                raise ChildLost(self._cause(await child.wait())) from None
            else:
                self._idle.append(child)
                child = None
            finally:
                if child is not None:
                    await _end(child)
        return answer

    async def close(self) -> None:
        """Ends the children."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        # Whatever gets out of its sandbox in there finds no password of ours.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ALLSPARK_")}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module, str(self._cpu_s), str(self._memory_bytes),
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment,
        )  # fmt: skip

    def _cause(self, status: int) -> str:
        if status == -signal.SIGXCPU:
            return f"takes more than {self._cpu_s:g} s of CPU time"
        log.warning("a child of %s ended with status %d over its work", self._module, status)
        return f"takes more than {self._memory_bytes >> 20} MiB, or fails"


async def _exchange(child: Process, work: Mapping[str, Any]) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    data = json.dumps(work).encode()
    child.stdin.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    await child.stdin.drain()
    length = int.from_bytes(await child.stdout.readexactly(LENGTH_BYTES), "big")
    answer: dict[str, Any] = json.loads(await child.stdout.readexactly(length))
    return answer


async def _end(child: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    await child.wait()
