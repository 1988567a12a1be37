"""Protocol messages to engine types and back. Admission has checked the values already."""

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from allspark_bus import keys, rich_text, tensors
from allspark_bus.catalogue import ModelRecord
from allspark_bus.compute_unit import parse_unit
from allspark_bus.ledger import Ending, now_ms
from allspark_bus.setting_types import WEIGHT_FORMATS
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import metadata
from numpy.typing import NDArray

from allspark_workers.engine.content import content_salt
from allspark_workers.engine.types import (
    EmbeddingRun,
    EngineRequest,
    EngineStat,
    FinishReason,
    GenerationParams,
    ModelConfig,
    ModelFacts,
    Task,
)
from allspark_workers.guided.guide import Guide
from allspark_workers.paths import confine
from allspark_workers.settings import WorkerSettings

_FINISHED = frozenset(FinishReason(reason) for reason in metadata.FINISHED_REASONS)
_DTYPE_OF_PRECISION = {
    "medium": "bf16",
    "medium_bf16": "bf16",
    "medium_fp16": "fp16",
    **{name: name for name in WEIGHT_FORMATS},
}


def generation_params(config: pb.GenerateConfig, max_length: int) -> GenerationParams:
    """What each wire zero means is in spec 2.5.1.

    One element of top_k_arr, top_p_arr or seed_arr takes the place of top_k, top_p or seed; several are those
    of the sequences.
    """
    return GenerationParams(
        max_length=config.max_length or max_length,
        min_length=max(0, config.min_length),
        eos_token_id=config.eos_token_id if config.eos_token_id >= 0 else None,
        early_stopping=config.early_stopping,
        stop_words=tuple(tuple(a.word) for a in config.stop_words_ids.ids if a.word),
        bad_words=tuple(tuple(a.word) for a in config.bad_words_ids.ids if a.word),
        do_sample=config.do_sample,
        temperature=config.temperature,
        top_k=config.top_k_arr[0] if config.top_k_arr else config.top_k,
        top_p=config.top_p_arr[0] if config.top_p_arr else config.top_p,
        seed=config.seed_arr[0] if config.seed_arr else config.seed,
        repetition_penalty=config.repetition_penalty or 1.0,
        presence_penalty=config.presence_penalty,
        suppress_repetition=config.suppress_repetition_in_generation,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        num_return_sequences=max(1, config.num_return_sequences),
        top_ks=tuple(config.top_k_arr) if len(config.top_k_arr) > 1 else (),
        top_ps=tuple(config.top_p_arr) if len(config.top_p_arr) > 1 else (),
        seeds=tuple(config.seed_arr) if len(config.seed_arr) > 1 else (),
        num_beams=max(1, config.num_beams),
        length_penalty=config.length_penalty,
    )


def engine_request(
    dispatch: fleet.Dispatch, generated: list[int], facts: ModelFacts, guide: Guide | None = None
) -> EngineRequest:
    """`generated`: the tokens that are in the stream already; `guide` has read them."""
    now_s = time.monotonic()
    deadline_s = None
    if dispatch.deadline_unix_ms:
        deadline_s = now_s + (dispatch.deadline_unix_ms - now_ms()) / 1000
    request = dispatch.request
    prompt = tensors.prompt_ids(request)
    embeddings = tuple(EmbeddingRun(*run) for run in rich_text.embedding_runs(request, prompt))
    return EngineRequest(
        request_id=dispatch.request_id,
        epoch=dispatch.epoch,
        prompt=prompt,
        params=generation_params(dispatch.request.config, facts.max_length),
        generated=generated,
        priority=dispatch.priority,
        tenant=keys.split_request_id(dispatch.request_id)[0],
        arrival_s=now_s - dispatch.waited_ms / 1000,
        deadline_s=deadline_s,
        lora_name=dispatch.request.config.lora_name,
        guide=guide,
        task=_task(request),
        embeddings=embeddings,
        content_salt=content_salt(embeddings),
    )


def _task(request: pb.StartRequestRequest) -> Task:
    if request.infer_type == pb.ModelInference:
        return Task.INFER
    return Task.PROBE if request.config.probe_only else Task.GENERATE


def ending_of(finish: FinishReason, message: str) -> Ending:
    """The terminal record of a finish reason."""
    status = pb.GenerateFinished if finish in _FINISHED else pb.GenerateInterrupted
    return Ending(status, finish.value, message)


def tensor_bytes(arrays: Mapping[str, NDArray[np.int64] | NDArray[np.float32]]) -> dict[str, bytes]:
    """What the terminal record carries besides tokens, serialised by name."""
    return {name: tensors.from_array(name, a).SerializeToString() for name, a in arrays.items()}


def model_config(record: ModelRecord, settings: WorkerSettings) -> ModelConfig:
    """How this worker loads a catalogue record. Raises FileError for paths outside the model root."""
    config = record.model_config()
    path = confine(config.model_path, settings.model_root)
    weights = confine(config.weights_path, settings.model_root) if config.weights_path else path
    devices = parse_unit(config.compute_unit).devices(settings.device)
    return ModelConfig(
        model_path=str(path),
        weights_path=str(weights),
        device=devices[0],
        devices=devices if len(devices) > 1 else (),
        dtype=_dtype(config.matmul_precision, weights, settings),
        max_length=config.engine_max_length,
        max_batch=config.engine_max_batch,
        span_size=config.cache_span_size,
        kv_bytes=int(settings.kv_memory or 0),
        kv_frames=config.cache_span_num_init,
        num_threads=config.num_threads or settings.num_threads,
        cache_mode=config.cache_mode,
        lora_names=tuple(config.lora_names.names),
        lora_roots=(str(weights if weights.is_dir() else weights.parent), *map(str, settings.model_root)),
        lora_max_num=settings.lora_max_num,
        lora_max_rank=settings.lora_max_rank,
        enable_prefix_cache=config.enable_prefix_cache,
        prefix_cache_ttl_s=config.prefix_cache_ttl,
        prefix_host_bytes=int(settings.prefix_host_memory or 0),
    )


def _dtype(precision: str, weights: Path, settings: WorkerSettings) -> str:
    """`highest` and `high` keep every bit of the weights: dequantised GGUF values need fp32 for that."""
    if settings.dtype != "auto":
        return settings.dtype
    if precision in _DTYPE_OF_PRECISION:
        return _DTYPE_OF_PRECISION[precision]
    return "fp32" if settings.device == "cpu" and weights.suffix == ".gguf" else "auto"


def facts_message(facts: ModelFacts, kv_tokens: int = 0) -> fleet.ModelFacts:
    """What admission needs to know of a loaded model."""
    return fleet.ModelFacts(
        model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        max_length=facts.max_length,
        max_batch=facts.max_batch,
        kv_tokens=kv_tokens,
        eos_token_ids=facts.eos_token_ids,
        device="CUDA" if facts.device.startswith("cuda") else "CPU",
        dtype=facts.dtype,
        num_layers=facts.num_layers,
        digest=facts.digest,
        hidden_size=facts.hidden_size,
    )


def progress_message(stat: EngineStat) -> fleet.Progress:
    """What forecasts are made from."""
    return fleet.Progress(
        full_step_s=stat.full_step_s,
        prompt_token_s=stat.prompt_token_s,
        prompt_left=stat.prompt_left,
        output_left=stat.output_left,
        next_step_s=stat.next_step_s,
    )


def stat_message(name: str, stat: EngineStat) -> pb.AsEngineStat:
    """AsEngineStat of one worker; the broker adds them up."""
    return pb.AsEngineStat(
        model_name=name,
        total_span=stat.total_span,
        used_span=stat.used_span,
        free_span=stat.free_span,
        free_token=stat.free_token,
        span_size=stat.span_size,
        pendding_request=stat.pending_request,
        running_request=stat.running_request,
        total_device_memory_pool_size=stat.total_device_memory_pool_size,
        used_device_memory_pool_size=stat.used_device_memory_pool_size,
        total_generated_token=stat.total_generated_token,
        total_prefill_token=stat.total_prefill_token,
        generate_token_persec=stat.generate_token_persec,
        process_token_persec=stat.process_token_persec,
        prefix_cache_hit_token=stat.prefix_cache_hit_token,
        prefix_cache_miss_token=stat.prefix_cache_miss_token,
    )
