"""A GGUF file: its metadata as an Architecture, its tensors dequantised under Hugging Face names."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from allspark_kernels import QuantisedWeight

from allspark_workers.engine.errors import ModelIOError, UnsupportedModelError
from allspark_workers.models.architecture import Architecture, MoeParams, RopeParams, checked_layers
from allspark_workers.models.gguf_codes import KEPT_BITS, quantised_weight
from allspark_workers.models.gguf_families import ARCHITECTURES, family_of, hugging_face_tensors
from allspark_workers.models.gguf_header import GGUFFormatError, TensorInfo, read_gguf

# Gemma 2 and 3 with 27 billion parameters.
_SCALED_BY_HIDDEN: Final = {("gemma2", 46), ("gemma3", 62)}
_SOFTMAX: Final = 1
_ROPE_TYPES: Final = {"none": "default", "linear": "linear", "yarn": "yarn"}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFFile:
    """An open GGUF file; a WeightSource. Raises ModelIOError on a missing, truncated or foreign file."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self.paths = [path]
        try:
            self._header = read_gguf(path)
        except GGUFFormatError as error:
            raise ModelIOError(f"{path} is truncated or not a GGUF file: {error}") from error
        except OSError as error:
            raise ModelIOError(f"cannot read {path}: {error}") from error
        self._name: str = str(self._field("general.architecture"))
        family = family_of(self._name)
        if family is None:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(
                f"{self.location}: GGUF architecture {self._name!r} is not supported; known: {known}"
            )
        self._family = family
        self._tensors = dict(hugging_face_tensors(self._header.tensors, family))
        self.architecture = self._read_architecture()
        self.dtype = self._own_dtype()

    def names(self) -> frozenset[str]:
        """All tensor names that belong to a known part of a model."""
        return frozenset(self._tensors)

    def stored(self, name: str) -> QuantisedWeight | None:
        """The matrix as codes, rows in the half-split rotary order; None in formats that are dequantised."""
        tensor = self._tensors.get(name)
        weight = None if tensor is None else quantised_weight(tensor)
        if weight is None or not self._is_permuted(name):
            return weight
        return weight.rows(self._unpermute(name, torch.arange(len(weight.codes))))

    def stored_bytes(self) -> int:
        """Bytes of the matrices with codes and scales as the kernels hold them, others as float32."""
        total = 0
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                bits = KEPT_BITS.get(tensor.kind, 32)
                total += math.prod(tensor.shape) * bits // 8
        return total

    def get(self, name: str) -> torch.Tensor:
        """The tensor as float32 (F16 and BF16 as stored), rows in the half-split rotary order."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelIOError(f"{self.location} has no tensor for {name}: the file is incomplete")
        values = _to_torch(tensor, self.location)
        if values.ndim == 1 and name.endswith("shared_expert_gate.weight"):
            values = values.unsqueeze(0)  # a matrix of one row, stored without its first dimension
        return self._unpermute(name, values)

    def _is_permuted(self, name: str) -> bool:
        return self._name == "llama" and re.search(r"self_attn\.[qk]_proj\.", name) is not None

    def _unpermute(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Undo the row order that the GGUF converter gives q and k of llama.

        It stores them for rotation of neighbours (x[2i], x[2i+1]); ours pairs (x[i], x[i + D/2]). qwen2 and
        qwen3 are stored half-split.
        """
        arch = self.architecture
        if not self._is_permuted(name):
            return values
        heads = arch.num_heads if "q_proj" in name else arch.num_kv_heads
        if values.shape[0] != heads * arch.head_dim:
            raise ModelIOError(f"{name} of {self.location} has {values.shape[0]} rows, not {heads} heads")
        tail = values.shape[1:]
        paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *tail)
        return paired.transpose(1, 2).reshape(values.shape).contiguous()

    def _own_dtype(self) -> torch.dtype:
        """The plain dtype that most matrix elements have, or bfloat16 if they are quantised."""
        counts: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.kind.name] += math.prod(tensor.shape)
        if not counts:
            raise ModelIOError(f"{self.location} holds no weight matrices")
        return _PLAIN.get(counts.most_common(1)[0][0], torch.bfloat16)

    def _read_architecture(self) -> Architecture:
        if self._key("expert_count", 0) and not self._family.has_experts:
            raise UnsupportedModelError(
                f"{self.location}: mixture-of-experts models of {self._name} are not supported"
            )
        try:
            return self._architecture()
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelIOError(f"{self.location} lacks or misstates a value: {error!r}") from error

    def _architecture(self) -> Architecture:
        names = self._tensors
        hidden, heads = int(self._need("embedding_length")), int(self._need("attention.head_count"))
        head_dim = int(self._key("attention.key_length", hidden // heads))
        context = int(self._need("context_length"))
        eos = self._field("tokenizer.ggml.eos_token_id")
        end_of_turn = self._field("tokenizer.ggml.eot_token_id")
        num_layers = checked_layers(int(self._need("block_count")))
        family, rope = self._family, self._rope(head_dim, context)
        return Architecture(
            family=family.name,
            vocab_size=names["model.embed_tokens.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=int(self._need("feed_forward_length")),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=int(self._key("attention.head_count_kv", heads)),
            head_dim=head_dim,
            norm_eps=float(self._need("attention.layer_norm_rms_epsilon")),
            max_positions=context,
            rope=rope,
            has_qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
            has_output_bias="model.layers.0.self_attn.o_proj.bias" in names,
            has_mlp_bias="model.layers.0.mlp.up_proj.bias" in names,
            has_qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
            is_tied="lm_head.weight" not in names,
            windows=self._windows(num_layers),
            eos_token_ids=tuple(dict.fromkeys(int(i) for i in (eos, end_of_turn) if i is not None)),
            activation=family.activation,
            has_post_norms=family.names.mlp_post_norm is not None,
            is_rope_interleaved=family.is_rope_interleaved,
            embedding_scale=float(hidden) ** 0.5 if family.scales_embeddings else 1.0,
            query_scale=self._query_scale(num_layers, hidden, heads),
            attention_soft_cap=float(self._key("attn_logit_softcapping", family.attention_soft_cap)),
            final_soft_cap=float(self._key("final_logit_softcapping", family.final_soft_cap)),
            local_rope=self._local_rope(rope),
            moe=self._experts(num_layers),
        )

    def _windows(self, num_layers: int) -> tuple[int, ...]:
        window = int(self._key("attention.sliding_window", 0))
        period = self._family.window_pattern if self._family.windows == "pattern" else 0
        local = [not period or (i + 1) % period != 0 for i in range(num_layers)]
        return tuple(window if is_local else 0 for is_local in local) if window and any(local) else ()

    def _query_scale(self, num_layers: int, hidden: int, heads: int) -> float | None:
        """Files do not say it; the two models that divide by another width are known by their depth."""
        if (self._name, num_layers) in _SCALED_BY_HIDDEN:
            return float((hidden / heads) ** -0.5)
        return None

    def _local_rope(self, rope: RopeParams) -> RopeParams | None:
        theta = self._family.local_rope_theta
        if theta is None:
            return None
        return RopeParams(
            theta=float(self._key("rope.freq_base_swa", theta)),
            rotary_dim=rope.rotary_dim,
            original_max_positions=rope.original_max_positions,
        )

    def _experts(self, num_layers: int) -> MoeParams | None:
        if not self._family.has_experts:
            return None
        if self._key("expert_gating_func", _SOFTMAX) != _SOFTMAX:
            raise UnsupportedModelError(f"{self.location}: only routing by softmax is supported")
        has_shared = self._family.has_shared_expert
        return MoeParams(
            num_experts=int(self._need("expert_count")),
            top_k=int(self._need("expert_used_count")),
            expert_size=int(self._need("expert_feed_forward_length")),
            shared_size=int(self._need("expert_shared_feed_forward_length")) if has_shared else 0,
            # Files written before this key was: only the models with a shared expert do not normalise.
            is_normalised=bool(self._key("expert_weights_norm", not has_shared)),
            is_sparse=tuple(f"model.layers.{i}.mlp.gate.weight" in self._tensors for i in range(num_layers)),
        )

    def _rope(self, head_dim: int, context: int) -> RopeParams:
        kind = self._key("rope.scaling.type", "none")
        if kind not in _ROPE_TYPES:
            raise UnsupportedModelError(
                f"{self.location}: rope scaling {kind!r} is not supported; known: {', '.join(_ROPE_TYPES)}"
            )
        attention_factor = self._key("rope.scaling.attn_factor", None)
        short, long = (self._divisors(f"rope_factors_{which}.weight") for which in ("short", "long"))
        return RopeParams(
            kind="longrope" if short else _ROPE_TYPES[kind],
            theta=float(self._key("rope.freq_base", 10000.0)),
            rotary_dim=int(self._key("rope.dimension_count", head_dim)),
            factor=float(self._key("rope.scaling.factor", 1.0)),
            original_max_positions=int(self._key("rope.scaling.original_context_length", context)),
            attention_factor=None if attention_factor is None else float(attention_factor),
            beta_fast=float(self._key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._key("rope.scaling.yarn_beta_slow", 1.0)),
            divisors=self._divisors("rope_freqs.weight"),
            short_divisors=short,
            long_divisors=long,
        )

    def _divisors(self, name: str) -> tuple[float, ...]:
        tensor = self._header.tensors.get(name)
        return () if tensor is None else tuple(_to_torch(tensor, self.location).float().tolist())

    def _field(self, name: str) -> Any:
        return self._header.metadata.get(name)

    def _key(self, name: str, default: Any) -> Any:
        value = self._field(f"{self._name}.{name}")
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise UnsupportedModelError(f"{self.location}: {name} differs between layers")
            return value[0]
        return default if value is None else value

    def _need(self, name: str) -> Any:
        value = self._key(name, None)
        if value is None:
            raise KeyError(f"{self._name}.{name}")
        return value


def _to_torch(tensor: TensorInfo, location: str) -> torch.Tensor:
    """Dequantise to float32; BF16 and F16 are reinterpreted, not converted."""
    kind, data = tensor.kind.name, tensor.data
    if kind in _PLAIN:
        return torch.from_numpy(data.copy()).view(_PLAIN[kind]).reshape(tensor.shape)
    try:
        values = gguf.quants.dequantize(data, tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{location}: tensor {tensor.name} is stored as {kind}, which cannot be dequantised"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(tensor.shape)
