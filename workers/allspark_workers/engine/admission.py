"""What a request must be for the engine to accept it; the edge has checked the same before."""

from __future__ import annotations

import numpy as np

from allspark_workers.engine.types import EngineRequest, ModelFacts

_INT64_MAX = 2**63 - 1


def check_request(request: EngineRequest, facts: ModelFacts, max_length: int) -> None:
    """Raise ValueError, naming the request, for anything that could not be computed or would index wildly.

    `max_length`: rows of the rotary table, the longest request the model can compute at all.
    """
    key, params, prompt, vocab_size = request.request_id, request.params, request.prompt, facts.vocab_size
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
    _check_sequences(request, facts)
    _check_embeddings(request, facts)


def _check_sequences(request: EngineRequest, facts: ModelFacts) -> None:
    key, params = request.request_id, request.params
    count = params.num_return_sequences
    if count < 1 or params.num_beams < 1:
        raise ValueError(f"request {key}: num_beams and num_return_sequences must be at least 1")
    if any(len(values) not in (0, count) for values in (params.top_ks, params.top_ps, params.seeds)):
        raise ValueError(f"request {key}: top_ks, top_ps and seeds have one element per sequence, or none")
    if any(not -_INT64_MAX - 1 <= seed <= _INT64_MAX for seed in params.seeds) or any(
        top_k < 0 for top_k in params.top_ks
    ):
        raise ValueError(f"request {key}: an element of seeds or top_ks is out of range")
    if params.num_beams == 1:
        return
    if request.guide is not None:
        raise ValueError(f"request {key}: beams cannot be guided")
    if count > params.num_beams or params.num_beams > facts.max_batch:
        raise ValueError(
            f"request {key}: num_beams {params.num_beams} must be at least num_return_sequences {count} "
            f"and at most the batch size {facts.max_batch}"
        )
    if 2 * params.num_beams > facts.vocab_size or request.generated:
        raise ValueError(f"request {key}: beams need two tokens each, and a stream that has none yet")


def _check_embeddings(request: EngineRequest, facts: ModelFacts) -> None:
    end = 0
    for run in request.embeddings:
        if run.values.dtype != np.float32 or run.values.shape[1:] != (facts.hidden_size,):
            raise ValueError(f"request {request.request_id}: embeddings must be float32 [rows, hidden]")
        if run.start < end or run.start + len(run.values) > len(request.prompt):
            raise ValueError(f"request {request.request_id}: embeddings overlap or leave the prompt")
        end = run.start + len(run.values)
