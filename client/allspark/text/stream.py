"""Token ids to text while they arrive."""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"
#: An incomplete character is at most three bytes, so more waiting tokens than this are not one.
_MAX_WAITING_TOKENS = 8


class TextStream:
    """Collects ids and gives out text as soon as it is certain.

    A character may be spread over several tokens, and a tokenizer may treat the start of a text differently;
    so the ids since the last safe point are decoded together and only what is new is given out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # ids[:shown] are given out; they stay as context for the next piece

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; empty while a character is incomplete."""
        before = self._decode(self._ids[: self._shown])
        self._ids += ids
        now = self._decode(self._ids)
        if now.endswith(_BROKEN) and len(self._ids) - self._shown < _MAX_WAITING_TOKENS:
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end; an incomplete character shows as U+FFFD."""
        before = self._decode(self._ids[: self._shown])
        now = self._decode(self._ids)
        self._ids, self._shown = [], 0
        return now[len(before) :]
