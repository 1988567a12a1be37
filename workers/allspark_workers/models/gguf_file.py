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
from allspark_workers.models.architecture import Architecture, RopeParams
from allspark_workers.models.gguf_codes import KEPT_BITS, quantised_weight
from allspark_workers.models.gguf_header import GGUFFormatError, TensorInfo, read_gguf

# GGUF has no name of its own for Mistral: it is stored as llama.
_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_ROPE_TYPES: Final = {"none": "default", "linear": "linear", "yarn": "yarn"}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
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
        named = {_hugging_face_name(name): tensor for name, tensor in self._header.tensors.items()}
        self._tensors = {name: tensor for name, tensor in named.items() if name is not None}
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
        return self._unpermute(name, _to_torch(tensor, self.location))

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
        name = self._field("general.architecture")
        if name not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise UnsupportedModelError(
                f"{self.location}: GGUF architecture {name!r} is not supported; known: {known}"
            )
        self._name: str = name
        if self._key("expert_count", 0):
            raise UnsupportedModelError(f"{self.location}: mixture-of-experts models are not supported")
        try:
            return self._architecture()
        except (KeyError, TypeError, ValueError) as error:
            raise ModelIOError(f"{self.location} lacks or misstates a value: {error!r}") from error

    def _architecture(self) -> Architecture:
        names = self._tensors
        hidden, heads = int(self._need("embedding_length")), int(self._need("attention.head_count"))
        head_dim = int(self._key("attention.key_length", hidden // heads))
        context = int(self._need("context_length"))
        eos = self._field("tokenizer.ggml.eos_token_id")
        end_of_turn = self._field("tokenizer.ggml.eot_token_id")
        num_layers = int(self._need("block_count"))
        window = self._key("attention.sliding_window", 0)
        return Architecture(
            family=self._name,
            vocab_size=names["model.embed_tokens.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=int(self._need("feed_forward_length")),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=int(self._key("attention.head_count_kv", heads)),
            head_dim=head_dim,
            norm_eps=float(self._need("attention.layer_norm_rms_epsilon")),
            max_positions=context,
            rope=self._rope(head_dim, context),
            has_qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
            has_output_bias="model.layers.0.self_attn.o_proj.bias" in names,
            has_mlp_bias="model.layers.0.mlp.up_proj.bias" in names,
            has_qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
            is_tied="lm_head.weight" not in names,
            windows=(int(window),) * num_layers if window else (),
            eos_token_ids=tuple(dict.fromkeys(int(i) for i in (eos, end_of_turn) if i is not None)),
        )

    def _rope(self, head_dim: int, context: int) -> RopeParams:
        kind = self._key("rope.scaling.type", "none")
        if kind not in _ROPE_TYPES:
            raise UnsupportedModelError(
                f"{self.location}: rope scaling {kind!r} is not supported; known: {', '.join(_ROPE_TYPES)}"
            )
        attention_factor = self._key("rope.scaling.attn_factor", None)
        divisors = self._header.tensors.get("rope_freqs.weight")
        return RopeParams(
            kind=_ROPE_TYPES[kind],
            theta=float(self._key("rope.freq_base", 10000.0)),
            rotary_dim=int(self._key("rope.dimension_count", head_dim)),
            factor=float(self._key("rope.scaling.factor", 1.0)),
            original_max_positions=int(self._key("rope.scaling.original_context_length", context)),
            attention_factor=None if attention_factor is None else float(attention_factor),
            beta_fast=float(self._key("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(self._key("rope.scaling.yarn_beta_slow", 1.0)),
            divisors=() if divisors is None else tuple(_to_torch(divisors, self.location).float().tolist()),
        )

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


def _hugging_face_name(name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _BLOCK:
        return None
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


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
