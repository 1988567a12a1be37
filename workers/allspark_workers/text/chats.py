"""Chat templates applied in a child process, which their endless loops and their memory end alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from allspark_workers.children import ChildLost, Children
from allspark_workers.text.errors import TextError
from allspark_workers.text.tokenizer import Tokenizer

#: For one conversation; the templates of real models take milliseconds and a few MiB for the longest.
CPU_S: Final = 2.0
MAX_BYTES: Final = 256 << 20
#: Of a prompt whose model is not known: more than any can read.
MAX_CHARS: Final = 64 << 20


class Chats:
    """Event-loop thread only."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._children = Children("allspark_workers.text.chat_child", cpu_s, MAX_BYTES)

    async def render(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], max_chars: int
    ) -> str:
        """The prompt for the assistant's next turn, at most ``max_chars`` long.

        Raises ``TextError``: no template, one that refuses the messages, or that takes too much.
        """
        work = {
            "template": tokenizer.chat_template,
            "messages": messages,
            "special_tokens": tokenizer.special_tokens,
            "max_chars": max_chars,
        }
        try:
            answer = await self._children.ask(work)
        except ChildLost as error:
            raise TextError(f"the model's chat template {error} for these messages") from None
        except RecursionError:
            raise TextError("messages is nested too deeply") from None
        if "problem" in answer:
            raise TextError(answer["problem"])
        return str(answer["text"])

    async def close(self) -> None:
        """Ends the children."""
        await self._children.close()


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """As ``Tokenizer.encode_chat``, for a template from anywhere; not to be called from an event loop.

    Raises ``TextError`` as well for one that takes too long or too much.
    """

    async def render() -> str:
        chats = Chats()
        try:
            return await chats.render(tokenizer, messages, MAX_CHARS)
        finally:
            await chats.close()

    return tokenizer.encode_piece(asyncio.run(render()))
