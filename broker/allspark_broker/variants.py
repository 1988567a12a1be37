"""Admission of requests that want more, or something else, than one sequence of tokens. Pure functions."""

import math

import numpy as np
from allspark_bus import rich_text
from allspark_bus.errors import LimitError, ParamError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from numpy.typing import NDArray

MAX_BEAMS = 8
MAX_SEQUENCES = 128
MAX_LENGTH_PENALTY = 8.0
#: Hidden states and logits of a ModelInference have to fit into one message.
MAX_INFERENCE_BYTES = 48 << 20


def check_sequences(config: pb.GenerateConfig, facts: fleet.ModelFacts) -> None:
    """Beams, sequences and their own settings. Raises ParamError or LimitError."""
    count, beams = max(1, config.num_return_sequences), max(1, config.num_beams)
    if count > MAX_SEQUENCES:
        raise LimitError(f"num_return_sequences is {count}, the limit is {MAX_SEQUENCES}")
    if beams > 1:
        _check_beams(config, count, facts)
    for name in ("top_k_arr", "top_p_arr", "seed_arr"):
        size = len(getattr(config, name))
        if size not in (0, 1, count):
            raise ParamError(
                f"{name} has {size} elements: legal are none, one, or one for each of {count} sequences"
            )
    for top_k in config.top_k_arr:
        if top_k < 0:
            raise ParamError(f"top_k_arr has {top_k}; an element must not be negative")
    for top_p in config.top_p_arr:
        if not 0 <= top_p <= 1:
            raise ParamError(f"top_p_arr has {top_p:g}, legal is [0, 1]")


def _check_beams(config: pb.GenerateConfig, count: int, facts: fleet.ModelFacts) -> None:
    beams, penalty = config.num_beams, config.length_penalty
    if beams > MAX_BEAMS:
        raise ParamError(f"num_beams is {beams}, legal is up to {MAX_BEAMS}")
    if count > beams:
        raise ParamError(f"num_return_sequences is {count}: {beams} beams have no more than {beams} results")
    if facts.max_batch and beams > facts.max_batch:
        raise LimitError(f"{beams} beams decode together, but engine_max_batch is {facts.max_batch}")
    if 2 * beams > facts.vocab_size:
        raise ParamError(f"num_beams is {beams}: a vocabulary of {facts.vocab_size} has too few tokens")
    if not math.isfinite(penalty) or abs(penalty) > MAX_LENGTH_PENALTY:
        limit = MAX_LENGTH_PENALTY
        raise ParamError(f"length_penalty is {penalty:g}, legal is [-{limit:g}, {limit:g}]")


def check_task(request: pb.StartRequestRequest, prompt: NDArray[np.int64], facts: fleet.ModelFacts) -> None:
    """What kind of request it is, and what it brings along for that. Raises ParamError or LimitError."""
    if request.infer_type not in (pb.Generate, pb.ModelInference):
        raise ParamError(f"infer_type {request.infer_type} is unknown; use Generate or ModelInference")
    if request.mm_type not in (pb.TextInput, pb.MultiMediaTypeRichText):
        raise ParamError(f"mm_type {request.mm_type} is unknown; use TextInput or MultiMediaTypeRichText")
    if request.infer_type == pb.ModelInference:
        if request.config.probe_only:
            raise ParamError("probe_only asks for no result, ModelInference for one: use one of them")
        size = 4 * (len(prompt) * facts.hidden_size + facts.vocab_size)
        if size > MAX_INFERENCE_BYTES:
            raise LimitError(
                f"hidden states of {len(prompt)} tokens and the logits have {size} bytes, the limit is "
                f"{MAX_INFERENCE_BYTES}: use a shorter prompt"
            )
    for run in rich_text.embedding_runs(request, prompt):
        width = run.values.shape[1]
        if facts.hidden_size and width != facts.hidden_size:
            raise ParamError(
                f"embeddings at {run.start} have {width} values each, the model's have {facts.hidden_size}"
            )
