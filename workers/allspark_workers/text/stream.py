"""Token ids to text while they arrive."""

from collections.abc import Callable, Sequence

#: What decoders put for bytes that are no complete character; an incomplete one at the end is one of these.
_BROKEN = "\ufffd"
_MAX_WINDOW_TOKENS, _KEPT_TOKENS = 64, 16


class TextStream:
    """Collects ids and gives out text as soon as it is certain.

    A character may be spread over several tokens, and a tokenizer may treat the start of a text differently;
    so a window of the last ids is decoded together and only what is new in its text is given out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were given out

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; empty while a character is incomplete."""
        self._window += ids
        text = self._decode(self._window)
        certain = len(text.removesuffix(_BROKEN))
        new = text[self._num_shown : certain]
        self._num_shown = max(self._num_shown, certain)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._window[-_KEPT_TOKENS:]
            self._num_shown = len(self._decode(self._window).removesuffix(_BROKEN))
        return new

    def flush(self) -> str:
        """What is left at the end; an incomplete character shows as U+FFFD."""
        rest = self._decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        return rest
