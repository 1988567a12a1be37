"""What a caller may ask for, and the messages made of it."""

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from allspark_proto import allspark_service_pb2 as pb

CACHE_MODES = {"default": 0, "int8": 1, "uint4": 2}
"""Numbers of ``ModelOptions.cache_mode`` by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How to generate. The defaults are greedy decoding up to the model's length limit.

    ``max_new_tokens`` counts generated tokens, ``max_length`` and ``min_length`` prompt and generated tokens
    together; give at most one of the first two. ``early_stopping`` ends at ``eos_token_id`` (None: no such
    token). ``top_k`` 0 and ``top_p`` 0 are off. ``response_format`` makes the text follow a JSON schema, a
    regular expression or a grammar (docs/guided-decoding.md); it needs ``vocab`` and ``vocab_type`` only if
    the model has no tokenizer of its own.

    With ``num_return_sequences`` > 1 the first sequence is streamed; the others come at the end, in
    ``Request.progress.other_sequences()``. ``top_k_arr``, ``top_p_arr`` and ``seed_arr`` have an element for
    each. With ``num_beams`` > 1 everything comes at the end, best first, with the scores in
    ``Request.progress.sequence_scores()``; ``early_stopping`` then ends the search once ``num_beams`` beams
    have ended.
    """

    max_new_tokens: int | None = None
    max_length: int = 0
    min_length: int = 0
    eos_token_id: int | None = None
    early_stopping: bool = True
    stop_words_ids: Sequence[Sequence[int]] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    suppress_repetition_in_generation: bool = False
    no_repeat_ngram_size: int = 0
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    top_k_arr: Sequence[int] = ()
    top_p_arr: Sequence[float] = ()
    seed_arr: Sequence[int] = ()
    async_token_num: int = 0
    first_token_num: int = 0
    probe_only: bool = False
    lora_name: str = ""
    response_format: Mapping[str, str] = field(default_factory=dict)
    vocab: Mapping[str, int] = field(default_factory=dict)
    vocab_type: int = pb.VOCAB_TYPE_WPM

    def to_config(self, uuid: str, prompt_tokens: int) -> pb.GenerateConfig:
        """The message for a prompt of that many tokens; raises ``ValueError`` for contradicting lengths."""
        if self.max_new_tokens is not None and self.max_length:
            raise ValueError("give max_new_tokens or max_length, not both")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        max_length = self.max_length if self.max_new_tokens is None else prompt_tokens + self.max_new_tokens
        return pb.GenerateConfig(
            uuid=uuid,
            max_length=max_length,
            min_length=self.min_length,
            eos_token_id=-1 if self.eos_token_id is None else self.eos_token_id,
            early_stopping=self.early_stopping and self.eos_token_id is not None,
            stop_words_ids=pb.StopWordIds(ids=[pb.StopWordIds.Array(word=w) for w in self.stop_words_ids]),
            bad_words_ids=pb.BadWordIds(ids=[pb.BadWordIds.Array(word=w) for w in self.bad_words_ids]),
            do_sample=self.do_sample,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            suppress_repetition_in_generation=self.suppress_repetition_in_generation,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            num_beams=self.num_beams,
            num_return_sequences=self.num_return_sequences,
            length_penalty=self.length_penalty,
            top_k_arr=self.top_k_arr,
            top_p_arr=self.top_p_arr,
            seed_arr=self.seed_arr,
            async_token_num=self.async_token_num,
            first_token_num=self.first_token_num,
            probe_only=self.probe_only,
            lora_name=self.lora_name,
            response_format=dict(self.response_format),
            vocab=dict(self.vocab),
            vocab_type=pb.VocabType.ValueType(self.vocab_type),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How to build a model; an empty or zero value lets the fleet choose.

    ``compute_unit`` is ``CPU:0``, ``CUDA:0``, or several (``CUDA:0,1``); ``max_length`` is in tokens, prompt
    included; ``span_size`` is in tokens; ``prefix_cache_ttl_s`` in seconds. ``cache_mode`` says how K and V
    are kept: 0 in the model's number format, 1 as int8, 2 as uint4 (see CACHE_MODES).
    """

    weights_path: str = ""
    compute_unit: str = ""
    matmul_precision: str = ""
    max_length: int = 0
    max_batch: int = 0
    span_size: int = 0
    cache_mode: int = 0
    enable_prefix_cache: bool = True
    prefix_cache_ttl_s: int = 300
    swap_threshold: int = -1
    lora_names: Sequence[str] = ()
    num_threads: int = 0

    def to_config(self, name: str, path: str) -> pb.ModelStructConfig:
        """The message that builds the model at ``path`` under ``name``."""
        return pb.ModelStructConfig(
            model_name=name,
            model_path=path,
            weights_path=self.weights_path,
            compute_unit=self.compute_unit,
            matmul_precision=self.matmul_precision,
            swap_threshold=self.swap_threshold,
            engine_max_length=self.max_length,
            engine_max_batch=self.max_batch,
            lora_names=pb.LoraNames(names=self.lora_names),
            cache_span_size=self.span_size,
            cache_mode=pb.AsCacheMode.ValueType(self.cache_mode),
            enable_prefix_cache=self.enable_prefix_cache,
            prefix_cache_ttl=self.prefix_cache_ttl_s,
            num_threads=self.num_threads,
        )


def token_tensor(ids: Sequence[int]) -> pb.Tensor:
    """Token ids as the INT64 tensor [1, S] that ``input_ids`` is; little-endian on every machine."""
    data = array("q", ids)
    if sys.byteorder == "big":
        data.byteswap()
    return pb.Tensor(
        name="input_ids",
        shape=pb.Tensor.Shape(dims=[1, len(ids)]),
        device_type=pb.DeviceType(dev_type=pb.CPU),
        data_type=pb.INT64,
        data=data.tobytes(),
    )


#: Token ids, or text, or a conversation ({"role", "content"}) for the model's chat template.
Prompt = Sequence[int] | str | Sequence[Mapping[str, str]]


def start_request_message(
    model: str, prompt: Prompt, options: GenerateOptions, uuid: str
) -> pb.StartRequestRequest:
    """The message that submits a prompt; sending it twice runs it once."""
    if isinstance(prompt, str):
        return _text_message(model, "text", prompt, options, uuid)
    if prompt and isinstance(prompt[0], Mapping):
        conversation = json.dumps(list(prompt), ensure_ascii=False)
        return _text_message(model, "messages", conversation, options, uuid)
    ids = cast(Sequence[int], prompt)
    return pb.StartRequestRequest(
        model_name=model,
        inputs=pb.TensorMap(tensor_map={"input_ids": token_tensor(ids)}),
        config=options.to_config(uuid, len(ids)),
    )


def _text_message(
    model: str, name: str, text: str, options: GenerateOptions, uuid: str
) -> pb.StartRequestRequest:
    """The fleet counts the prompt's tokens, and knows the ends of the model where the caller names none."""
    inputs = {name: pb.Tensor(data_type=pb.STRING, shape=pb.Tensor.Shape(dims=[1]), data=text.encode())}
    if options.max_new_tokens is not None:
        count = token_tensor([options.max_new_tokens])
        count.name = "max_new_tokens"
        inputs[count.name] = count
    config = options.to_config(uuid, 0)
    config.max_length = options.max_length
    if options.eos_token_id is None and options.early_stopping:
        config.eos_token_id, config.early_stopping = 0, True
    return pb.StartRequestRequest(model_name=model, inputs=pb.TensorMap(tensor_map=inputs), config=config)
