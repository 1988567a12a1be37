"""What a request must be for the engine to accept it; the edge has checked the same before."""

from __future__ import annotations

import numpy as np

from allspark_workers.engine.types import EngineRequest

_INT64_MAX = 2**63 - 1


def check_request(request: EngineRequest, vocab_size: int, max_length: int) -> None:
    """Raise ValueError, naming the request, for anything that could not be computed or would index wildly.

    `max_length`: rows of the rotary table, the longest request the model can compute at all.
    """
    key, params, prompt = request.request_id, request.params, request.prompt
    if prompt.ndim != 1 or prompt.dtype != np.int64 or len(prompt) == 0:
        raise ValueError(f"request {key}: the prompt must be a non-empty int64 vector")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise ValueError(f"request {key}: a prompt id lies outside [0, {vocab_size})")
    if any(not 0 <= token < vocab_size for token in request.generated):
        raise ValueError(f"request {key}: a generated id lies outside [0, {vocab_size})")
    if params.max_length > max_length:
        raise ValueError(f"request {key}: max_length {params.max_length} exceeds the limit of {max_length}")
    if params.max_length <= len(prompt):
        raise ValueError(
            f"request {key}: max_length {params.max_length} leaves no room after {len(prompt)} tokens"
        )
    if len(prompt) + len(request.generated) > params.max_length:
        raise ValueError(f"request {key}: more tokens are generated already than max_length allows")
    banned = [word[-1] for word in params.bad_words if word]
    if params.eos_token_id is not None:
        banned.append(params.eos_token_id)
    if any(not 0 <= token < vocab_size for token in banned):
        raise ValueError(f"request {key}: an eos or bad-word id lies outside [0, {vocab_size})")
    if params.repetition_penalty == 0 or params.no_repeat_ngram_size < 0 or params.top_k < 0:
        raise ValueError(f"request {key}: repetition_penalty, no_repeat_ngram_size or top_k is out of range")
    if not -_INT64_MAX - 1 <= params.seed <= _INT64_MAX:
        raise ValueError(f"request {key}: seed {params.seed} does not fit into 64 bits")
