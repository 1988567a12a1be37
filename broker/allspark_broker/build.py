"""What a ModelStructConfig must satisfy before a build begins (spec 1.4.1, 2.4). Pure functions."""

from collections.abc import Iterable

from allspark_bus.compute_unit import parse_unit
from allspark_bus.errors import FileError, LimitError, ParamError
from allspark_bus.setting_types import WEIGHT_FORMATS
from allspark_proto import allspark_service_pb2 as pb

from allspark_broker.admission import check_adapter_name

SPAN_SIZES = (0, 16, 32, 64, 128)
CACHE_MODES = (0, 1, 2)
PRECISIONS = ("", "highest", "high", "medium", "medium_bf16", "medium_fp16", *WEIGHT_FORMATS)
MAX_NAME_BYTES = 128
MAX_BATCH = 65_536  # workers keep a slot for each
MAX_ADAPTERS = 1024


def check_config(config: pb.ModelStructConfig) -> None:
    """Raises ParamError or FileError with the first thing that is wrong."""
    # Of a message with several faults upstream names the path first, and the name last.
    if not config.model_path:
        raise FileError("model_path is empty: name a Hugging Face directory or a GGUF file")
    parse_unit(config.compute_unit)
    if config.cache_span_size not in SPAN_SIZES:
        raise ParamError(f"cache_span_size is {config.cache_span_size}, legal are 0, 16, 32, 64, 128")
    for name in ("cache_span_num_init", "cache_span_num_grow", "num_threads", "engine_max_batch"):
        if getattr(config, name) < 0:
            raise ParamError(f"{name} is {getattr(config, name)}; it must not be negative")
    if config.engine_max_batch > MAX_BATCH:
        raise ParamError(f"engine_max_batch is {config.engine_max_batch}, the limit is {MAX_BATCH}")
    if config.matmul_precision not in PRECISIONS:
        raise ParamError(
            f"matmul_precision {config.matmul_precision!r} is unknown; legal are {', '.join(PRECISIONS[1:])}"
        )
    if config.engine_max_length < 0 or 0 < config.engine_max_length <= 2:
        raise ParamError(
            f"engine_max_length is {config.engine_max_length}; at least 3, or 0 for the model's own"
        )
    if config.cache_mode not in CACHE_MODES:
        raise ParamError(f"cache_mode is {config.cache_mode}, legal are 0, 1 (int8), 2 (uint4)")
    if len(config.lora_names.names) > MAX_ADAPTERS:
        raise LimitError(f"lora_names has {len(config.lora_names.names)} names, the limit is {MAX_ADAPTERS}")
    for name in config.lora_names.names:
        check_adapter_name("lora_names", name)
        if not name:
            raise ParamError("lora_names holds an empty name")
    if config.swap_threshold < -1:
        raise ParamError(
            f"swap_threshold is {config.swap_threshold}; legal are -1 (off), 0 (every tensor), or bytes"
        )
    if config.prefix_cache_ttl < 0:
        raise ParamError(f"prefix_cache_ttl is {config.prefix_cache_ttl}; it must not be negative")
    if not config.model_name:
        raise ParamError("model_name is empty")
    if len(config.model_name.encode()) > MAX_NAME_BYTES:
        raise ParamError(f"model_name is longer than {MAX_NAME_BYTES} bytes")


def model_information(name: str, facts_device: str) -> str:
    """The text of ModelInfo (spec 2.6.1) for a generative model."""
    line = "    {{ name: {}, device: {}, dtype: INT64, shape: [0, 0], addr: (nil), val: (null) }}\n"
    inputs: Iterable[str] = ("input_ids", "attention_mask")
    return (
        f"Model Type : {name}\nModel Inputs : \n"
        + "".join(line.format(i, facts_device) for i in inputs)
        + "Model Outputs:\n"
        + line.format("generated_ids", facts_device)
    )
