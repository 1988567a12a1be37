"""The forward pass shared by all families, over a ragged batch and a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from allspark_kernels import AttentionPlan, PackedExperts, PackedLinear

from allspark_workers.models.architecture import Architecture
from allspark_workers.models.ops import KernelOps


@dataclass(frozen=True, slots=True)
class StepTensors:
    """T tokens of B requests, one request after the other, on the model's device.

    ids, positions, slots [T] int64 (slots as in `rotary_kv_write`); `last` [R] int64: the tokens whose logits
    are wanted, None if all of them.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    plan: AttentionPlan
    last: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """act(gate) * up, then down. `gate_up` stacks both matrices."""

    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Experts; the router [E, H] picks `top_k` for each token. `shared` serves every token, behind a gate."""

    router: PackedLinear
    gate_up: PackedExperts
    down: PackedExperts
    shared: DenseMlp | None
    shared_gate: PackedLinear | None
    top_k: int
    is_normalised: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block. Norm weights in the compute dtype; `q_norm`, `k_norm` [head_dim] or None.

    `attention_post_norm`, `mlp_post_norm` [H] are applied to what attention and MLP give back, None: as it
    is. `window`: tokens that attention sees, 0: all. `cos_sin`: a rotation of its own, None: the decoder's.
    """

    input_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    mlp: DenseMlp | ExpertMlp
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None
    window: int = 0
    cos_sin: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V of every layer: `keys[l]`, `values[l]` [num_spans, num_kv_heads, span_size, row width].

    The row width is head_dim, or more bytes of a quantised cache (`allspark_kernels.kv_format`).
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class Exchange(Protocol):
    """How the ranks of a model on several devices complete each other's results."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x [T, H]."""

    def join_columns(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """[R, width] from every rank's columns."""


class Decoder:
    """Weights, laid out for their device, and the forward pass; with `exchange`: one rank's part of them."""

    def __init__(
        self,
        arch: Architecture,
        embedding: torch.Tensor,
        layers: list[Layer],
        final_norm: torch.Tensor,
        lm_head: PackedLinear,
        cos_sin: torch.Tensor,
        exchange: Exchange | None = None,
    ) -> None:
        self.arch = arch
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.cos_sin = cos_sin
        self.exchange = exchange
        self.compute_dtype = final_norm.dtype
        self._scale = arch.head_dim**-0.5 if arch.query_scale is None else arch.query_scale
        # Rounded like the embeddings that it multiplies, as the reference implementation does.
        self._embedding_scale = torch.tensor(arch.embedding_scale, dtype=embedding.dtype).item()
        self._tables = [cos_sin if layer.cos_sin is None else layer.cos_sin for layer in layers]
        self._heads = [arch.num_heads, arch.num_kv_heads, arch.num_kv_heads]
        # The norm that follows a block's MLP is the next block's first one.
        following = [layer.input_norm for layer in layers[1:]] + [final_norm]
        self._blocks = list(zip(layers, following, strict=True))

    def forward(self, ops: KernelOps, step: StepTensors, cache: KVCache) -> torch.Tensor:
        """Logits [R, V] in the compute dtype of the tokens in `step.last`; writes K and V of all T tokens."""
        return self.blocks(ops, self.embed(ops, step.ids), step, cache)

    def embed(self, ops: KernelOps, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, H] of `ids` [T] in the compute dtype."""
        x = ops.embed(self.embedding, ids, self.compute_dtype)
        return x if self._embedding_scale == 1.0 else x.mul_(self._embedding_scale)

    def blocks(
        self, ops: KernelOps, residual: torch.Tensor, step: StepTensors, cache: KVCache
    ) -> torch.Tensor:
        """From embeddings [T, H] (overwritten) to logits, as `forward`; `step.ids` is not read."""
        return self.logits(ops, self.hidden(ops, residual, step, cache))

    def logits(self, ops: KernelOps, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] from hidden states [R, H] after the final norm."""
        logits = ops.lm_head(hidden, self.lm_head)
        if self.arch.final_soft_cap:
            ops.soft_cap(logits, self.arch.final_soft_cap)
        if self.exchange is None:
            return logits
        return self.exchange.join_columns(logits, self.arch.vocab_size)

    def hidden(
        self, ops: KernelOps, residual: torch.Tensor, step: StepTensors, cache: KVCache
    ) -> torch.Tensor:
        """From embeddings [T, H] (overwritten) to hidden states [R, H] after the final norm.

        While `step.last` is None, every computation is an operation of `ops` and tensors are only viewed in
        between: so the pass can be captured.
        """
        add_norm, linear, eps = ops.add_rms_norm, ops.linear, self.arch.norm_eps
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        final = len(self._blocks) - 1
        for index, (layer, next_norm) in enumerate(self._blocks):
            caches = (cache.keys[index], cache.values[index])
            x = self._attend(ops, layer, x, step, self._tables[index], caches)
            if index == final and step.last is not None:
                # Nothing after the last attention mixes tokens: go on with those that are wanted.
                x, residual = x.index_select(0, step.last), residual.index_select(0, step.last)
            x = self._whole(linear(x, layer.output))
            if layer.attention_post_norm is not None:
                x = ops.rms_norm(x, layer.attention_post_norm, eps)
            x = add_norm(x, residual, layer.mlp_norm, eps)
            x = self._whole(self._mlp(ops, layer.mlp, x))
            if layer.mlp_post_norm is not None:
                x = ops.rms_norm(x, layer.mlp_post_norm, eps)
            x = add_norm(x, residual, next_norm, eps)
        return x

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.exchange is None else self.exchange.sum(x)

    def _attend(
        self,
        ops: KernelOps,
        layer: Layer,
        x: torch.Tensor,
        step: StepTensors,
        cos_sin: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Normed input [T, H] -> heads' output [T, num_heads * head_dim], before the output projection."""
        tokens, dim = x.shape[0], self.arch.head_dim
        qkv = ops.linear(x, layer.qkv)
        q, k, v = qkv.view(tokens, -1, dim).split_with_sizes(self._heads, 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm_heads(ops, qkv.view(-1, dim), layer.q_norm, layer.k_norm)
        keys, values = cache
        ops.rotary_kv_write(q, k, v, cos_sin, step.positions, step.slots, keys, values)
        cap = self.arch.attention_soft_cap
        x = ops.paged_attention(q, keys, values, step.plan, self._scale, window=layer.window, soft_cap=cap)
        return x.view(tokens, -1)

    def _mlp(self, ops: KernelOps, mlp: DenseMlp | ExpertMlp, x: torch.Tensor) -> torch.Tensor:
        """Normed input [T, H] -> [T, H]."""
        gated = ops.gelu_mul if self.arch.activation == "gelu_tanh" else ops.silu_mul
        if isinstance(mlp, DenseMlp):
            return ops.linear(gated(ops.linear(x, mlp.gate_up)), mlp.down)
        routing = ops.route_experts(ops.linear(x, mlp.router), mlp.top_k, mlp.is_normalised)
        wide = ops.grouped_linear(x, mlp.gate_up, routing)
        inner = gated(wide.flatten(0, 1)).view(*wide.shape[:2], wide.shape[2] // 2)
        parts = ops.grouped_linear(inner, mlp.down, routing)
        if mlp.shared is None or mlp.shared_gate is None:
            return ops.combine_experts(parts, routing)
        shared = self._mlp(ops, mlp.shared, x)
        return ops.combine_experts(parts, routing, shared, ops.linear(x, mlp.shared_gate))

    def _norm_heads(
        self, ops: KernelOps, heads: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised q and k out of all heads [T * (Hq + 2 Hk), D].

        Each call norms all rows and a view picks those meant: cheaper than copying q and k out of qkv first.
        """
        num_q, num_k, num_v = self._heads
        shape, eps = (-1, num_q + num_k + num_v, self.arch.head_dim), self.arch.norm_eps
        q = ops.rms_norm(heads, q_norm, eps).view(shape)[:, :num_q]
        k = ops.rms_norm(heads, k_norm, eps).view(shape)[:, num_q : num_q + num_k]
        return q, k
