"""ModelInference: what a forward pass over a prompt leaves behind besides its K and V."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class HiddenStates(NamedTuple):
    """Of one chunk: `states` [count, hidden] after the final norm; `logits` [vocab] of its last token."""

    states: NDArray[np.float32]
    logits: NDArray[np.float32]


class Inference:
    """Collects the chunks of one prompt, in any division and after any repetition."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._states: NDArray[np.float32] | None = None
        self._logits: NDArray[np.float32] | None = None

    def put(self, start: int, chunk: HiddenStates) -> None:
        """States of the tokens from `start` on."""
        count, hidden = chunk.states.shape
        if self._states is None:
            self._states = np.empty((self._num_tokens, hidden), np.float32)
        self._states[start : start + count] = chunk.states
        if start + count == self._num_tokens:
            self._logits = chunk.logits

    def tensors(self) -> dict[str, NDArray[Any]]:
        """`last_hidden_state` [1, S, hidden] and `logits` [1, vocab]; empty before the last chunk."""
        if self._states is None or self._logits is None:
            return {}
        return {"last_hidden_state": self._states[None], "logits": self._logits[None]}
