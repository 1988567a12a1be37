"""Text in the inputs of a StartRequest: tensors `text` or `messages` instead of `input_ids`.

Brokers have a worker turn them into ids and record both: `input_ids` as with any request, and the text as the
sign that text is wanted back.
"""

from typing import Final, NamedTuple

import numpy as np
from allspark_proto import allspark_service_pb2 as pb

from allspark_bus import tensors
from allspark_bus.errors import LimitError, ParamError

TEXT: Final = "text"
MESSAGES: Final = "messages"
IDS: Final = "input_ids"
MAX_NEW_TOKENS: Final = "max_new_tokens"
NAMES: Final = frozenset({TEXT, MESSAGES, MAX_NEW_TOKENS})
#: No vocabulary has tokens this long on average, so longer text cannot fit and is not even read.
MAX_BYTES_PER_TOKEN: Final = 64
#: A prompt leaves room for two tokens, as upstream requires.
PROMPT_HEADROOM: Final = 2
_INT32_MAX = 2**31 - 1


class TextPrompt(NamedTuple):
    """`kind` is TEXT or MESSAGES (JSON)."""

    kind: str
    text: str


def check_length(num_prompt: int, max_length: int) -> None:
    """Raises LimitError for a prompt of more tokens than a model of this length takes."""
    limit = max_length - PROMPT_HEADROOM
    if num_prompt > limit:
        raise LimitError(
            f"the prompt has {num_prompt} tokens, the limit is {limit} "
            f"(engine_max_length {max_length} less {PROMPT_HEADROOM})"
        )


def is_text(request: pb.StartRequestRequest) -> bool:
    """Whether there is text among its inputs."""
    return TEXT in request.inputs.tensor_map or MESSAGES in request.inputs.tensor_map


def wants_text(request: pb.StartRequestRequest) -> bool:
    """Whether a request as recorded gets text with its tokens."""
    return request.infer_type == pb.Generate and is_text(request)


def text_prompt(request: pb.StartRequestRequest, max_length: int) -> TextPrompt | None:
    """The text of a request as it was sent; None if it has ids.

    Raises ParamError (both, or not one UTF-8 STRING), LimitError for what cannot fit `max_length` tokens.
    """
    if not is_text(request):
        return None
    inputs = request.inputs.tensor_map
    given = [name for name in (IDS, TEXT, MESSAGES) if name in inputs]
    if len(given) > 1:
        raise ParamError(f"inputs has tensors {' and '.join(map(repr, given))}: give one of them")
    name = given[0]
    tensor = inputs[name]
    if tensor.data_type != pb.STRING:
        raise ParamError(f"tensor {name!r} must be a STRING, the UTF-8 bytes of one string")
    tensors.check(name, tensor)
    if len(tensor.data) > max_length * MAX_BYTES_PER_TOKEN:
        raise LimitError(
            f"tensor {name!r} has {len(tensor.data)} bytes, which cannot fit engine_max_length {max_length}"
        )
    return TextPrompt(name, tensor.data.decode())


def put_ids(request: pb.StartRequestRequest, ids: bytes, eos_ids: list[int]) -> None:
    """Completes a request with text: `ids` (int64, little-endian), lengths, and ends where it asks for them.

    `max_new_tokens` [1] becomes max_length. With early_stopping and eos_token_id 0 the model's own `eos_ids`
    end the answer: who sends text need not know ids. Raises ParamError.
    """
    count, config = len(ids) // 8, request.config
    tensor = request.inputs.tensor_map[IDS]
    tensor.shape.dims[:] = [1, count]
    tensor.data_type = pb.INT64
    tensor.data = ids
    if (new := _max_new_tokens(request)) is not None:
        if config.max_length:
            raise ParamError("give max_length or the tensor max_new_tokens, not both")
        config.max_length = min(count + new, _INT32_MAX)
    if config.early_stopping and config.eos_token_id == 0:
        config.eos_token_id = eos_ids[0] if eos_ids else -1
        for index in eos_ids[1:]:
            config.stop_words_ids.ids.add(word=[index])


def _max_new_tokens(request: pb.StartRequestRequest) -> int | None:
    if MAX_NEW_TOKENS not in request.inputs.tensor_map:
        return None
    tensor = request.inputs.tensor_map[MAX_NEW_TOKENS]
    if tensor.data_type not in (pb.INT64, pb.INT32):
        raise ParamError(f"tensor {MAX_NEW_TOKENS!r} must be INT64 or INT32")
    values = np.ravel(tensors.to_array(MAX_NEW_TOKENS, tensor, 1))
    if len(values) != 1 or int(values[0]) < 1:
        raise ParamError(f"tensor {MAX_NEW_TOKENS!r} must hold one number of at least 1")
    return int(values[0])
