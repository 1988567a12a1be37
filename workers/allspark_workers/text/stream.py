"""Token ids to text while they arrive."""

from collections.abc import Callable, Collection, Sequence

#: What decoders put for bytes that are no complete character; an incomplete one at the end is one of these.
_BROKEN = "\ufffd"
_MAX_WINDOW_TOKENS, _KEPT_TOKENS = 64, 16


class TextStream:
    """Collects ids and gives out text as soon as it is certain.

    A character may be spread over several tokens, and a tokenizer may treat the start of a text differently;
    so a window of the last ids is decoded together and only what is new in its text is given out. What has
    been given out depends on the ids alone, not on how they were grouped into pushes.

    ``byte_ids``: tokens that stand for one byte of a character which the vocabulary lacks. What a run of them
    means is not certain before it is over, as its decoder takes all of it or nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], byte_ids: Collection[int] = ()) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were given out

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids; empty while a character is incomplete."""
        return "".join([self._push(token) for token in ids])

    def flush(self) -> str:
        """What is left at the end; an incomplete character shows as U+FFFD."""
        rest = self._decode(self._window)[self._num_shown :]
        self._window, self._num_shown = [], 0
        return rest

    def _push(self, token: int) -> str:
        self._window.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode(self._window)
        certain = len(text.removesuffix(_BROKEN))
        new = text[self._num_shown : certain]
        self._num_shown = max(self._num_shown, certain)
        if len(self._window) > _MAX_WINDOW_TOKENS:
            self._shorten()
        return new

    def _shorten(self) -> None:
        """Forget ids whose text is certain; what is kept must have text, or the next would begin a text."""
        kept = self._window[-_KEPT_TOKENS:]
        if text := self._decode(kept).removesuffix(_BROKEN):
            self._window, self._num_shown = kept, len(text)
