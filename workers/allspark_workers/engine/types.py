"""What goes into the engine and what comes out of it; pure data, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from allspark_workers.guided.guide import Guide

SPAN_SIZES: Final = (16, 32, 64, 128)
DTYPES: Final = ("auto", "bf16", "fp16", "fp32", "int8", "int4", "int4_g64", "int4_g32")
CACHE_MODES: Final = (0, 1, 2)
DEFAULT_SPAN_TOKENS: Final = 32
DEFAULT_MAX_BATCH: Final = 32
DEFAULT_PREFILL_CHUNK: Final = 512
DEFAULT_LORA_MAX_NUM: Final = 5
DEFAULT_LORA_MAX_RANK: Final = 64


class FinishReason(StrEnum):
    """Why a request ended; the value is what goes into its terminal record."""

    EOS = "eos"
    LENGTH = "length"
    STOP_WORDS = "stop_words"
    STOPPED = "stopped"
    COMPLETE = "complete"
    CACHE_MEMORY = "cache_memory"
    DEADLINE = "deadline"
    GRAMMAR = "grammar"
    ERROR = "error"
    PROBED = "probed"
    INFERRED = "inferred"


class Task(StrEnum):
    """What is wanted of a request: tokens, only its prompt in the KV cache, or one forward pass over it."""

    GENERATE = "generate"
    PROBE = "probe"
    INFER = "infer"


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """One request's generation settings, already normalised at the edge (spec 2.5).

    `max_length` and `min_length` count prompt and generated tokens together; `max_length` exceeds the
    prompt. `eos_token_id` None: no such token. `do_sample` False or `temperature` below 1e-5: greedy.
    `top_k` 0: whole vocabulary. `top_p` outside (0, 1): off. `seed` is any 64-bit integer.

    `num_return_sequences` sequences are drawn independently; `top_ks`, `top_ps`, `seeds` are empty or have
    one element for each. `num_beams` > 1: beam search instead, of which that many best hypotheses are
    returned; `early_stopping` and `length_penalty` then have the meaning they have in transformers.
    """

    max_length: int
    min_length: int = 0
    eos_token_id: int | None = None
    early_stopping: bool = False
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    suppress_repetition: bool = False
    no_repeat_ngram_size: int = 0
    num_return_sequences: int = 1
    top_ks: tuple[int, ...] = ()
    top_ps: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRun:
    """`values` [rows, hidden] float32 replace the embeddings of prompt tokens `start .. start+rows-1`."""

    start: int
    values: NDArray[np.float32]


@dataclass(slots=True, eq=False)
class AdapterLease:
    """A request's hold on its adapter. `slot` is where the adapter lies, negative until it is in memory.

    `digest`: hex, over the adapter's configuration and weights; empty until then. The engine thread's.
    """

    name: str
    slot: int = -1
    digest: str = ""

    @property
    def is_in_force(self) -> bool:
        """Whether the adapter can be used."""
        return self.slot >= 0

    def enter_into_force(self, slot: int, digest: str) -> None:
        """The adapter is in memory and stays there while the lease lasts."""
        self.slot, self.digest = slot, digest

    def retract(self) -> None:
        """The lease is over."""
        self.slot, self.digest = -1, ""


@dataclass(slots=True)
class EngineRequest:
    """A request as one worker runs it.

    `generated` holds the tokens that are already in the stream when the request is resumed here: they are
    not emitted again and count as generated. `arrival_s` and `deadline_s` are monotonic-clock seconds;
    `arrival_s` is when it was submitted to the fleet. `tenant`: whose requests it may pre-empt.
    `lora_name`: its adapter, empty for the base model; the engine that takes the request fills in `adapter`.
    `embeddings` are in order and do not overlap; `content_salt` is a hash of what the prompt's KV depends on
    besides its ids (b"": nothing), so equal ids with different salts must not share KV.
    `guide` says which tokens may come next; it has read `generated`, and belongs to the engine from now on.
    """

    request_id: str
    epoch: int
    prompt: NDArray[np.int64]
    params: GenerationParams
    generated: list[int] = field(default_factory=list)
    priority: int = 0
    tenant: str = ""
    arrival_s: float = 0.0
    deadline_s: float | None = None
    lora_name: str = ""
    adapter: AdapterLease | None = None
    task: Task = Task.GENERATE
    embeddings: tuple[EmbeddingRun, ...] = ()
    content_salt: bytes = b""
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """New tokens of one request; `position` is the index of `tokens[0]` in the generated sequence.

    Every submitted request gets exactly one output whose `finish` is set. `message` says why it ended when
    the reason alone does not (ERROR, CACHE_MEMORY, DEADLINE). `tensors`, only with `finish`, are what the
    request produced besides its tokens: further sequences (int64), scores, states and logits (float32).
    """

    request_id: str
    epoch: int
    position: int
    tokens: list[int]
    finish: FinishReason | None = None
    message: str = ""
    tensors: Mapping[str, NDArray[np.int64] | NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known about a loaded model.

    `max_length`: the longest request in tokens, prompt included. `span_size`: tokens per span; `span_bytes`:
    bytes of one frame, that is K or V of one layer for `span_size` tokens. `digest`: hex, over the
    configuration and the weights' names, shapes and dtypes. `cache_mode` as in ModelConfig: KV of one
    mode is worthless under another. `tokenizer_paths`: where the model's tokenizer may be, best first.
    """

    model_type: str
    vocab_size: int
    max_length: int
    max_batch: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    span_size: int
    span_bytes: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    weight_bytes: int
    digest: str
    cache_mode: int = 0
    hidden_size: int = 0
    tokenizer_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStat:
    """A snapshot for AsEngineStat (spec 2.6.5): spans are frames (2 x layers per span id), sizes bytes.

    For forecasts: seconds of a step that decodes a full batch (`full_step_s`) and one row more than now
    (`next_step_s`), seconds for a token of a prompt (0: not measured yet), and the tokens that live requests
    have left, output by its limit.
    """

    total_span: int
    used_span: int
    free_span: int
    free_token: int
    span_size: int
    pending_request: int
    running_request: int
    total_device_memory_pool_size: int
    used_device_memory_pool_size: int
    total_generated_token: int
    total_prefill_token: int
    generate_token_persec: float
    process_token_persec: float
    prefix_cache_hit_token: int = 0
    prefix_cache_miss_token: int = 0
    prefix_cache_hit_rate: float = 0.0
    prefix_cache_miss_rate: float = 0.0
    steps: int = 0
    last_step_s: float = 0.0
    full_step_s: float = 0.0
    next_step_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_left: int = 0
    output_left: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How a model is loaded and run; zero means "choose" wherever a default is named.

    `model_path`: a Hugging Face directory or a GGUF file; `weights_path` empty or the same, or where the
    weights lie if not there. `dtype` "auto": the checkpoint's own (quantised GGUF: bf16), with activations as
    precise as the device has them; fp32, bf16, fp16: products of numbers of that type, with fp32 sums;
    int8, int4, int4_g64, int4_g32: weights rounded to so many bits (groups of 128, 64, 32). `max_length`
    0: the model's own. `max_batch` 0: 32. `span_size` tokens, 0: 32. `kv_bytes` 0: a bounded share of free
    memory. `kv_frames`: how many frames the KV pool has, 0: what the memory and a full batch allow.
    `num_threads` 0: as many as the process may use. `prefill_chunk`: prompt tokens computed per step.
    `lora_names`: adapters to load with the model; `lora_roots`: directories that they and later ones are
    searched in; at most `lora_max_num` are in memory at a time, of rank `lora_max_rank` or less.
    `cache_mode`: how K and V are stored, 0 in the model's dtype, 1 as int8, 2 as uint4.
    `enable_prefix_cache`: keep K and V of prompts for `prefix_cache_ttl_s` seconds after their last use (0:
    share them among live requests only), up to `prefix_host_bytes` of them in host memory if spans are short.
    `devices`: those of a model on several devices, a rank for each (`device` is then not read).
    """

    model_path: str
    weights_path: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    max_length: int = 0
    max_batch: int = 0
    span_size: int = 0
    kv_bytes: int = 0
    kv_frames: int = 0
    num_threads: int = 0
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    lora_names: tuple[str, ...] = ()
    lora_roots: tuple[str, ...] = ()
    lora_max_num: int = DEFAULT_LORA_MAX_NUM
    lora_max_rank: int = DEFAULT_LORA_MAX_RANK
    cache_mode: int = 0
    enable_prefix_cache: bool = False
    prefix_cache_ttl_s: float = 0.0
    prefix_host_bytes: int = 0
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ValueError("model_path is empty: name a Hugging Face directory or a GGUF file")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if self.span_size not in (0, *SPAN_SIZES):
            raise ValueError(f"span_size {self.span_size} is not one of 0, 16, 32, 64, 128")
        if self.cache_mode not in CACHE_MODES:
            raise ValueError(f"cache_mode {self.cache_mode} is not one of 0, 1 (int8), 2 (uint4)")
        for name in (
            *("max_length", "max_batch", "kv_bytes", "kv_frames", "num_threads"),
            *("prefix_cache_ttl_s", "prefix_host_bytes"),
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.lora_max_num < 0 or self.lora_max_rank < 1:
            raise ValueError(f"limits on adapters: number {self.lora_max_num}, rank {self.lora_max_rank}")
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {self.prefill_chunk}; it must be at least 1")

    @property
    def span_tokens(self) -> int:
        """Tokens per span with the default filled in."""
        return self.span_size or DEFAULT_SPAN_TOKENS

    @property
    def batch_limit(self) -> int:
        """Requests that decode together, with the default filled in."""
        return self.max_batch or DEFAULT_MAX_BATCH
