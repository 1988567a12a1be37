"""Documents are compiled once in a child process before this one touches them.

The library bounds most of what it does, but not all: a `multipleOf` of ten million builds an automaton of as
many states.
"""

from __future__ import annotations

from allspark_bus.response_format import Document

from allspark_workers.children import ChildLost, Children
from allspark_workers.guided.errors import GuideError


class Trials:
    """At most `num_children` at work; the limits are for one document. Event-loop thread only."""

    def __init__(self, cpu_s: float, memory_bytes: int, num_children: int = 2) -> None:
        self._children = Children("allspark_workers.guided.trial_child", cpu_s, memory_bytes, num_children)

    async def check(self, document: Document) -> None:
        """Raises GuideError if the document cannot be compiled within the limits."""
        try:
            answer = await self._children.ask({"kind": document.kind, "text": document.text})
        except ChildLost as error:
            raise GuideError(f"{document.kind}: compiling it {error}; simplify it") from None
        if answer["problem"]:
            raise GuideError(answer["problem"])

    async def close(self) -> None:
        """Ends the children."""
        await self._children.close()
