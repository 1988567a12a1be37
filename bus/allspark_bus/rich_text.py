"""Rich text: embeddings that stand in for placeholder tokens of a prompt (spec 2.3.7 and section D).

A tensor whose name is the decimal id of a token holds the embeddings of the n runs of that token in the
prompt, in order: shape [rows, hidden] for one run, [n, rows, hidden] for n. A run is as long as it can be.
"""

import re
from typing import NamedTuple

import numpy as np
from allspark_proto import allspark_service_pb2 as pb
from numpy.typing import NDArray

from allspark_bus import tensors
from allspark_bus.errors import ParamError

_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_FLOATS = (pb.FLOAT32, pb.FLOAT16, pb.BFLOAT16)


class Run(NamedTuple):
    """Embeddings `values` [rows, hidden] float32 of the prompt tokens from `start` on."""

    start: int
    values: NDArray[np.float32]


def is_embedding(request: pb.StartRequestRequest, name: str) -> bool:
    """Whether the request's tensor of that name holds embeddings."""
    return request.mm_type == pb.MultiMediaTypeRichText and _ID.fullmatch(name) is not None


def embedding_runs(request: pb.StartRequestRequest, prompt: NDArray[np.int64]) -> list[Run]:
    """The embeddings that a rich-text request brings along, in the order of the prompt; none for plain text.

    Raises ParamError for a tensor that is no matrix of numbers or does not fit the runs of its token.
    """
    runs: list[Run] = []
    for name, tensor in request.inputs.tensor_map.items():
        if is_embedding(request, name):
            runs += _runs_of(name, _floats(name, tensor), prompt)
    return sorted(runs, key=lambda run: run.start)


def _runs_of(name: str, values: NDArray[np.float32], prompt: NDArray[np.int64]) -> list[Run]:
    if values.ndim == 2:
        values = values[None]
    if values.ndim != 3 or 0 in values.shape:
        raise ParamError(f"tensor {name!r}: embeddings have shape [rows, hidden] or [n, rows, hidden]")
    is_token = np.concatenate(([False], prompt == int(name), [False]))
    edges = np.flatnonzero(is_token[1:] != is_token[:-1])
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    count, rows, _ = values.shape
    if len(starts) != count:
        raise ParamError(
            f"tensor {name!r} has embeddings for {count} runs of token {name}, the prompt has {len(starts)}"
        )
    if (lengths != rows).any():
        wrong = int(np.flatnonzero(lengths != rows)[0])
        raise ParamError(
            f"tensor {name!r} has {rows} rows for each run of token {name}, "
            f"the one at {starts[wrong]} of the prompt has {lengths[wrong]} tokens"
        )
    return [Run(int(start), own) for start, own in zip(starts, values, strict=True)]


def _floats(name: str, tensor: pb.Tensor) -> NDArray[np.float32]:
    if tensor.data_type not in _FLOATS:
        raise ParamError(f"tensor {name!r}: embeddings are FLOAT32, FLOAT16 or BFLOAT16")
    array = tensors.to_array(name, tensor)
    if tensor.data_type == pb.BFLOAT16:
        values = (array.astype(np.uint32) << 16).view(np.float32)
    else:
        values = array.astype(np.float32)
    if not np.isfinite(values).all():
        raise ParamError(f"tensor {name!r}: embeddings must be finite numbers")
    return values
