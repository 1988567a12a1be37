"""What others may know of a loaded model."""

from __future__ import annotations

from allspark_workers.engine.kv import KVLayout
from allspark_workers.engine.types import ModelConfig, ModelFacts
from allspark_workers.models.loader import Model


def model_facts(model: Model, config: ModelConfig, layout: KVLayout) -> ModelFacts:
    """The facts of a model with this configuration and memory."""
    arch = model.arch
    return ModelFacts(
        model_type=arch.family,
        vocab_size=arch.vocab_size,
        max_length=min(model.max_length, layout.num_tokens),
        max_batch=config.batch_limit,
        num_layers=arch.num_layers,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        span_size=layout.span_size,
        span_bytes=layout.frame_bytes,
        eos_token_ids=arch.eos_token_ids,
        dtype=model.dtype_name,
        device=str(model.device),
        weight_bytes=model.weight_bytes,
        digest=model.digest,
        tokenizer_paths=(config.model_path, config.weights_path or config.model_path),
        hidden_size=arch.hidden_size,
        cache_mode=config.cache_mode,
    )
