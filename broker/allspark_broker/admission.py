"""What a StartRequest must satisfy before it is recorded (spec 1.4.9, 2.3.4, 2.5). Pure functions."""

import hashlib
import math

import numpy as np
from allspark_bus import response_format, tensors, text_inputs
from allspark_bus.errors import CacheMemoryOut, LimitError, ParamError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from numpy.typing import NDArray

from allspark_broker import variants

MAX_WORDS = 1024
MAX_WORD_TOKENS = 1024
MAX_ADAPTER_NAME_BYTES = 512


def digest(request: pb.StartRequestRequest) -> bytes:
    """Identity of a request's body: equal digests are a retry, different ones a conflict."""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()


def check_uuid(uuid: str, max_bytes: int) -> None:
    """Raises ParamError for a uuid that is empty or too long."""
    if not uuid:
        raise ParamError(
            "config.uuid is empty: choose a uuid, so that a retry can be told from a new request"
        )
    if len(uuid.encode()) > max_bytes:
        raise ParamError(f"config.uuid has {len(uuid.encode())} bytes, the limit is {max_bytes}")


def check_request(request: pb.StartRequestRequest, facts: fleet.ModelFacts) -> None:
    """Raises ParamError, LimitError or CacheMemoryOut with the first thing that is wrong."""
    _check_counts(request.config)
    prompt = tensors.prompt_ids(request, facts.max_length)
    for name, tensor in request.inputs.tensor_map.items():
        # No input of a request has more than one hidden state for each token.
        tensors.check(name, tensor, facts.max_length * max(1, facts.hidden_size))
    _check_memory(len(prompt), facts)
    _check_lengths(len(prompt), request.config.max_length, facts)
    _check_ids("input_ids", prompt, facts.vocab_size)
    _check_words(request.config, facts.vocab_size)
    _check_ranges(request.config, facts.vocab_size)
    response_format.check(request.config, facts.vocab_size)
    variants.check_sequences(request.config, facts)
    variants.check_task(request, prompt, facts)


def check_adapter_name(field: str, name: str) -> None:
    """Raises ParamError for what can be no name of an adapter; workers say whether there is one."""
    if len(name.encode()) > MAX_ADAPTER_NAME_BYTES or "\0" in name:
        raise ParamError(f"{field}: a name has at most {MAX_ADAPTER_NAME_BYTES} bytes, none of them zero")


def _check_counts(config: pb.GenerateConfig) -> None:
    for name in ("num_beams", "num_return_sequences", "async_token_num", "first_token_num"):
        if getattr(config, name) < 0:
            raise ParamError(f"{name} is {getattr(config, name)}; it must not be negative")


def _check_memory(num_prompt: int, facts: fleet.ModelFacts) -> None:
    """Workers lower their length limit to what their KV memory holds: then memory is the reason."""
    if facts.kv_tokens and facts.kv_tokens <= facts.max_length and num_prompt + 1 > facts.kv_tokens:
        raise CacheMemoryOut(
            f"a prompt of {num_prompt} tokens can never fit the KV memory of {facts.kv_tokens} tokens"
        )


def _check_lengths(num_prompt: int, max_length: int, facts: fleet.ModelFacts) -> None:
    limit = facts.max_length
    if num_prompt == 0:
        raise LimitError("the prompt is empty")
    text_inputs.check_length(num_prompt, limit)
    if max_length < 0:
        raise ParamError(f"max_length is {max_length}; it must not be negative")
    if max_length > limit:
        raise LimitError(f"max_length {max_length} is over engine_max_length {limit}")
    if 0 < max_length <= num_prompt:
        raise LimitError(
            f"max_length {max_length} counts the prompt too and must exceed its {num_prompt} tokens"
        )


def _check_ids(name: str, ids: NDArray[np.int64], vocab_size: int) -> None:
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise ParamError(
            f"{name}: token id {int(ids[at])} at {at} is outside the vocabulary [0, {vocab_size})"
        )


def _check_words(config: pb.GenerateConfig, vocab_size: int) -> None:
    for name, words in (("stop_words_ids", config.stop_words_ids), ("bad_words_ids", config.bad_words_ids)):
        if len(words.ids) > MAX_WORDS:
            raise LimitError(f"{name} has {len(words.ids)} words, the limit is {MAX_WORDS}")
        for array in words.ids:
            if len(array.word) > MAX_WORD_TOKENS:
                raise LimitError(
                    f"{name}: a word has {len(array.word)} tokens, the limit is {MAX_WORD_TOKENS}"
                )
            _check_ids(name, np.asarray(array.word, np.int64), vocab_size)


def _check_ranges(config: pb.GenerateConfig, vocab_size: int) -> None:
    for name, low, high in (
        ("top_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, 2.0),
        ("presence_penalty", -2.0, 2.0),
    ):
        value = getattr(config, name)
        if not low <= value <= high:
            raise ParamError(f"{name} is {value:g}, legal is [{low:g}, {high:g}]")
    if not math.isfinite(config.temperature):
        raise ParamError(f"temperature is {config.temperature}; it must be a finite number")
    for name in ("top_k", "no_repeat_ngram_size"):
        if getattr(config, name) < 0:
            raise ParamError(f"{name} is {getattr(config, name)}; it must not be negative")
    if config.eos_token_id >= vocab_size:
        raise ParamError(
            f"eos_token_id {config.eos_token_id} is outside the vocabulary [0, {vocab_size}); "
            "negative means none"
        )
