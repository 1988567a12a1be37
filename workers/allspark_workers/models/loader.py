"""Load a model: from a Hugging Face directory or a GGUF file to weights laid out for their device."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from allspark_kernels import (
    PackedExperts,
    PackedLinear,
    QuantFormat,
    QuantisedWeight,
    compute_dtype,
    pack_experts,
    pack_linear,
    pack_quantised,
    quantise,
    stack_quantised,
)
from allspark_kernels.quantised import Weight

from allspark_workers.engine.errors import ModelIOError, ModelMemoryError, UnsupportedModelError
from allspark_workers.engine.promises import Loading
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.architecture import Architecture, RopeParams
from allspark_workers.models.decoder import Decoder, DenseMlp, Exchange, ExpertMlp, Layer
from allspark_workers.models.families import FAMILIES
from allspark_workers.models.gguf_file import GGUFFile
from allspark_workers.models.hf_config import read_architecture
from allspark_workers.models.precision import Precision, precision_of
from allspark_workers.models.rope import cos_sin_table, half_split_rows, settled
from allspark_workers.models.safetensors_source import SafetensorsSource
from allspark_workers.models.shards import Shard, ShardedSource
from allspark_workers.models.source import WeightSource, digest_files

logger = logging.getLogger(__name__)

_TABLE_BYTES = 4  # the rotary table is float32

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. `max_length`: longest request in tokens (configuration, context)."""

    decoder: Decoder
    arch: Architecture
    device: torch.device
    precision: Precision
    max_length: int
    weight_bytes: int
    digest: str
    shard: Shard | None = None
    whole: Architecture | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of embedding, KV and matrices that are not quantised."""
        return self.precision.dtype

    @property
    def dtype_name(self) -> str:
        """bf16, fp16, fp32, or how the weights are quantised (int8, int4, ...)."""
        return self.precision.name


def load_model(
    config: ModelConfig,
    progress: Progress | None = None,
    shard: Shard | None = None,
    exchange: Exchange | None = None,
) -> Model:
    """Read the checkpoint that `config` names; `progress(fraction, text)` is called as it goes on.

    `shard`: only this rank's part of a model on several devices, which `exchange` connects.

    Raises ModelIOError (missing, truncated or malformed file), UnsupportedModelError, ModelMemoryError.
    """
    report = progress or (lambda _fraction, _text: None)
    report(0.0, "reading configuration")
    arch, source, paths = _open(config)
    max_length = _max_length(config, arch)
    arch = whole = replace(arch, rope=settled(arch.rope, max_length))
    if shard is not None:
        arch, source = shard.architecture(arch), ShardedSource(source, arch, shard)
    device = _device(config.device)
    precision = precision_of(config.dtype, source.dtype, device)
    need = _matrix_bytes(arch, source, precision) + max_length * arch.rope.rotary_dim * _TABLE_BYTES
    with Loading(device, need, report) as loading:
        if need > loading.available:
            raise ModelMemoryError(
                f"weights of {source.location} need {_mib(need)} MiB as {precision.name}, "
                f"{device} has {_mib(loading.available)} MiB free"
            )
        try:
            builder = _Builder(arch, source, device, precision, loading.report, shard)
            decoder, weight_bytes = builder.build(max_length, exchange)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelMemoryError(
                f"out of memory on {device} while loading {source.location}: {error}"
            ) from error
    report(1.0, "weights loaded")
    digest = hashlib.sha256(f"{whole!r} {digest_files(paths)}".encode()).hexdigest()
    return Model(decoder, arch, device, precision, max_length, weight_bytes, digest, shard, whole)


def architecture_of(config: ModelConfig) -> Architecture:
    """What the model is, from its configuration alone. Raises ModelIOError or UnsupportedModelError."""
    return _open(config)[0]


def _open(config: ModelConfig) -> tuple[Architecture, WeightSource, list[Path]]:
    model = Path(config.model_path)
    weights = Path(config.weights_path) if config.weights_path else model
    for path in (model, weights):
        if not path.exists():
            raise ModelIOError(f"{path} does not exist")
    if model.is_file():
        if weights.resolve() != model.resolve():
            raise UnsupportedModelError(
                f"{model} is a GGUF file and holds its weights; leave weights_path empty"
            )
        file = GGUFFile(model)
        return file.architecture, file, file.paths
    arch = read_architecture(model)
    if weights.is_file() and weights.suffix == ".gguf":
        gguf_file = GGUFFile(weights)
        arch = replace(arch, norm_offset=0.0)  # these files hold the whole weights of norms
        return arch, gguf_file, [model / "config.json", weights]
    if not weights.is_dir():
        raise ModelIOError(f"{weights} is neither a directory with safetensors nor a .gguf file")
    source = SafetensorsSource(weights)
    return arch, source, [model / "config.json", *source.paths]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnsupportedModelError(f"device {name!r} is unknown; use cpu or cuda:N") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UnsupportedModelError(
                f"device {name} does not exist: this machine has {count} CUDA devices"
            )
    return device


def _max_length(config: ModelConfig, arch: Architecture) -> int:
    """The longest request."""
    limit = arch.max_positions
    asked = config.max_length or limit
    if asked > limit:
        logger.warning("%s: max_length %d cut to %d tokens, its context", config.model_path, asked, limit)
    return min(asked, limit)


def _mib(count: int) -> int:
    return -(-count // (1 << 20))


def _shared(rows: list[int], names: list[str]) -> list[int]:
    """Rows of each named tensor: one for each part, or all parts in one."""
    return rows if len(names) == len(rows) else [sum(rows)]


def _matrix_bytes(arch: Architecture, source: WeightSource, precision: Precision) -> int:
    """What the matrices will occupy, about."""
    if precision.keeps_stored and (stored := source.stored_bytes()):
        return stored + arch.vocab_size * arch.hidden_size * precision.dtype.itemsize
    return precision.weight_bytes(arch)


class _Builder:
    """Turns named tensors into packed weights, layer by layer, so that only one layer exists twice."""

    def __init__(
        self,
        arch: Architecture,
        source: WeightSource,
        device: torch.device,
        precision: Precision,
        report: Progress,
        shard: Shard | None,
    ) -> None:
        self._vocab = (shard or Shard(0, 1)).part(arch.vocab_size)
        self._arch = arch
        self._precision = precision
        self._form = precision.format
        self._source = source
        self._device = device
        self._dtype = precision.dtype
        self._compute = compute_dtype(device, precision.dtype)
        self._report = report
        self._bytes = 0
        self._local_cos_sin: torch.Tensor | None = None

    def build(self, max_length: int, exchange: Exchange | None) -> tuple[Decoder, int]:
        """The model and the bytes its weights occupy."""
        arch = self._arch
        layers = []
        if arch.local_rope is not None:
            self._local_cos_sin = self._rotation(arch.local_rope, max_length)
        for index in range(arch.num_layers):
            layers.append(self._layer(index))
            self._report((index + 1) / (arch.num_layers + 2), f"layer {index + 1} of {arch.num_layers}")
        table = self._tensor("model.embed_tokens.weight", (arch.vocab_size, arch.hidden_size), self._dtype)
        self._bytes += table.nbytes
        head = self._head(table)
        norm = self._norm("model.norm", arch.hidden_size)
        cos_sin = self._rotation(arch.rope, max_length)
        return Decoder(arch, table, layers, norm, head, cos_sin, exchange), self._bytes

    def _rotation(self, rope: RopeParams, max_length: int) -> torch.Tensor:
        cos_sin = cos_sin_table(rope, max_length).to(self._device)
        self._bytes += cos_sin.nbytes
        return cos_sin

    def _head(self, table: torch.Tensor) -> PackedLinear:
        """The output matrix, or this rank's rows of it."""
        form, rows = self._precision.head_format, self._vocab.stop - self._vocab.start
        if not self._is_tied():
            return self._matrix(["lm_head"], [rows], form=form)
        stored = self._stored([("model.embed_tokens.weight", tuple(table.shape))])
        if stored is not None:
            return self._pack(stored)
        own = table[self._vocab]
        return self._pack(own if form is None else quantise(own, form))

    def _is_tied(self) -> bool:
        if self._arch.is_tied is not None:
            return self._arch.is_tied
        return "lm_head.weight" not in self._source.names()

    def _layer(self, index: int) -> Layer:
        arch, names = self._arch, FAMILIES[self._arch.family].names
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        hidden = arch.hidden_size
        qkv = [attention + name for name in names.qkv]
        has_norm, mlp = arch.has_qk_norm, prefix + "mlp."
        return Layer(
            input_norm=self._norm(prefix + names.input_norm, hidden),
            qkv=self._matrix(
                qkv,
                _shared([q, kv, kv], qkv),
                bias=arch.has_qkv_bias,
                is_rotated=True,
                form=self._form,
            ),
            q_norm=self._norm(attention + "q_norm", arch.head_dim) if has_norm else None,
            k_norm=self._norm(attention + "k_norm", arch.head_dim) if has_norm else None,
            output=self._matrix(
                [attention + "o_proj"], [hidden], q, bias=arch.has_output_bias, form=self._form
            ),
            mlp_norm=self._norm(prefix + names.mlp_norm, hidden),
            mlp=self._experts(mlp) if arch.is_sparse(index) else self._mlp(mlp, arch.intermediate_size),
            attention_post_norm=self._optional_norm(prefix, names.attention_post_norm),
            mlp_post_norm=self._optional_norm(prefix, names.mlp_post_norm),
            window=arch.window_of(index),
            cos_sin=self._local_cos_sin if arch.window_of(index) else None,
        )

    def _mlp(self, prefix: str, width: int) -> DenseMlp:
        names, bias = FAMILIES[self._arch.family].names, self._arch.has_mlp_bias
        gate_up = [prefix + name for name in names.gate_up]
        return DenseMlp(
            gate_up=self._matrix(gate_up, _shared([width, width], gate_up), bias=bias, form=self._form),
            down=self._matrix(
                [prefix + "down_proj"], [self._arch.hidden_size], width, bias=bias, form=self._form
            ),
        )

    def _experts(self, prefix: str) -> ExpertMlp:
        moe, hidden = self._arch.moe, self._arch.hidden_size
        if moe is None:
            raise RuntimeError("experts of an architecture without any")
        wide, each = moe.expert_size, [f"{prefix}experts.{e}." for e in range(moe.num_experts)]
        gates, ups, downs = ([f"{e}{part}_proj.weight" for e in each] for part in ("gate", "up", "down"))
        gate_up = [
            self._weight([(gate, (wide, hidden)), (up, (wide, hidden))], self._form)
            for gate, up in zip(gates, ups, strict=True)
        ]
        down = [self._weight([(name, (hidden, wide))], self._form) for name in downs]
        return ExpertMlp(
            router=self._matrix([prefix + "gate"], [moe.num_experts]),
            gate_up=self._pack_experts(gate_up),
            down=self._pack_experts(down),
            shared=self._mlp(prefix + "shared_expert.", moe.shared_size) if moe.shared_size else None,
            shared_gate=self._matrix([prefix + "shared_expert_gate"], [1]) if moe.shared_size else None,
            top_k=moe.top_k,
            is_normalised=moe.is_normalised,
        )

    def _pack_experts(self, weights: list[Weight]) -> PackedExperts:
        packed = pack_experts(weights, rounds_inputs=self._precision.rounds_inputs)
        self._bytes += packed.nbytes
        return packed

    def _matrix(
        self,
        names: list[str],
        rows: list[int],
        columns: int | None = None,
        *,
        bias: bool = False,
        is_rotated: bool = False,
        form: QuantFormat | None = None,
    ) -> PackedLinear:
        """Stack the matrices (and biases) of `names` into one and lay it out, quantised if `form` says so.

        `is_rotated`: they are q, k and v, whose rows rotation may want in another order.
        """
        width = columns or self._arch.hidden_size
        weight = self._weight([(f"{n}.weight", (r, width)) for n, r in zip(names, rows, strict=True)], form)
        biases = None
        if bias:
            biases = self._stack([(f"{n}.bias", (r,)) for n, r in zip(names, rows, strict=True)])
        if is_rotated and self._arch.is_rope_interleaved:
            order = half_split_rows(self._arch, torch.arange(sum(rows), device=self._device))
            weight = weight.rows(order) if isinstance(weight, QuantisedWeight) else weight[order]
            biases = None if biases is None else biases[order]
        return self._pack(weight, biases)

    def _weight(self, shapes: list[tuple[str, tuple[int, ...]]], form: QuantFormat | None) -> Weight:
        """The matrices of these names and shapes as one: as stored, or in the model's precision."""
        stored = self._stored(shapes)
        if stored is not None:
            return stored
        weight = self._stack(shapes)
        return weight if form is None else quantise(weight, form)

    def _stored(self, shapes: list[tuple[str, tuple[int, ...]]]) -> QuantisedWeight | None:
        """The matrices as the checkpoint has them quantised, if they are and may stay so."""
        if not self._precision.keeps_stored:
            return None
        parts = [self._source.stored(name) for name, _ in shapes]
        quantised = [part for part in parts if part is not None]
        if len(quantised) < len(parts):
            return None
        for part, (name, shape) in zip(quantised, shapes, strict=True):
            self._check(name, tuple(part.codes.shape), shape)
        return quantised[0] if len(quantised) == 1 else stack_quantised(quantised)

    def _stack(self, shapes: list[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        parts = [self._tensor(name, shape, self._dtype) for name, shape in shapes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pack(self, weight: Weight, bias: torch.Tensor | None = None) -> PackedLinear:
        if isinstance(weight, QuantisedWeight):
            packed = pack_quantised(weight, bias)
        else:
            packed = pack_linear(weight, bias, rounds_inputs=self._precision.rounds_inputs)
        self._bytes += packed.nbytes
        return packed

    def _optional_norm(self, prefix: str, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._norm(prefix + name, self._arch.hidden_size)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._tensor(f"{name}.weight", (size,), torch.float32)
        weight = weight.add_(self._arch.norm_offset).to(self._compute)
        self._bytes += weight.nbytes
        return weight

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = self._source.get(name)
        self._check(name, tuple(tensor.shape), shape)
        # Always a copy: what the source returns may be a view of a mapped file, which others can change.
        return tensor.to(self._device, dtype, copy=True)

    def _check(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelIOError(
                f"tensor {name} of {self._source.location} has shape {list(found)}, "
                f"the configuration says {list(shape)}"
            )
