"""Which matrices of a decoder adapters can reach, how the model packs them, and which part a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from allspark_kernels import PackedLinear

from allspark_workers.models.architecture import Architecture
from allspark_workers.models.decoder import Decoder, DenseMlp, Layer
from allspark_workers.models.families import FAMILIES
from allspark_workers.models.rope import half_split_rows
from allspark_workers.models.shards import Shard, matrix_part

# A matrix's name inside its layer, rows and columns; a packed layer and the matrices that it stacks.
_Shape = tuple[str, int, int]
_Pack = tuple[PackedLinear, list[_Shape]]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMatrix:
    """One matrix [rows, columns] of the checkpoint that an adapter may name.

    `width`: how many of its rows are in the packed layer; `taken` [width] int64: which, in the packed order
    (None: all, as they are). `columns`: those that meet the packed layer's input.
    """

    module: str
    rows: int
    columns: int
    width: int
    taken: torch.Tensor | None
    own_columns: slice


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSite:
    """One packed layer [sum of widths, in_features] and the matrices whose outputs it stacks.

    It does not hold the layer itself: adapters must not keep weights in memory that the model has given up.
    """

    matrices: tuple[AdapterMatrix, ...]
    in_features: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows of each matrix in the packed layer."""
        return tuple(matrix.width for matrix in self.matrices)


def adapter_sites(
    decoder: Decoder, whole: Architecture | None = None, shard: Shard | None = None
) -> list[tuple[AdapterSite, PackedLinear]]:
    """The sites of all layers and the packed layers they stand for, in a fixed order.

    `whole`, `shard`: the decoder is that rank's part of a model of this architecture.
    """
    arch, part = whole or decoder.arch, shard or Shard(0, 1)
    sites = []
    for index, layer in enumerate(decoder.layers):
        packs = _attention(layer, arch)
        if isinstance(layer.mlp, DenseMlp):
            packs += _dense(layer.mlp, "mlp.", arch, arch.intermediate_size)
        elif arch.moe is not None and layer.mlp.shared is not None and layer.mlp.shared_gate is not None:
            # Single experts are stored as one tensor for all, which no adapter names.
            packs += _dense(layer.mlp.shared, "mlp.shared_expert.", arch, arch.moe.shared_size)
            packs.append((layer.mlp.shared_gate, [("mlp.shared_expert_gate", 1, arch.hidden_size)]))
        for packed, shapes in packs:
            found = [_matrix(f"model.layers.{index}.", shape, arch, part) for shape in shapes]
            if packed is layer.qkv and arch.is_rope_interleaved:
                found = _half_split(decoder.arch, found)
            sites.append((AdapterSite(tuple(found), packed.in_features), packed))
    return sites


def _attention(layer: Layer, arch: Architecture) -> list[_Pack]:
    heads, kv_heads = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    names, hidden = FAMILIES[arch.family].names, arch.hidden_size
    qkv = _shapes("self_attn.", names.qkv, [heads, kv_heads, kv_heads], hidden)
    return [(layer.qkv, qkv), (layer.output, [("self_attn.o_proj", hidden, heads)])]


def _dense(mlp: DenseMlp, prefix: str, arch: Architecture, width: int) -> list[_Pack]:
    names, hidden = FAMILIES[arch.family].names, arch.hidden_size
    gate_up = _shapes(prefix, names.gate_up, [width, width], hidden)
    return [(mlp.gate_up, gate_up), (mlp.down, [(f"{prefix}down_proj", hidden, width)])]


def _shapes(prefix: str, names: tuple[str, ...], rows: list[int], columns: int) -> list[_Shape]:
    """One matrix per name; a checkpoint that stores one for all has all its rows there."""
    counts = rows if len(names) > 1 else [sum(rows)]
    return [(prefix + name, count, columns) for name, count in zip(names, counts, strict=True)]


def _matrix(prefix: str, shape: _Shape, arch: Architecture, shard: Shard) -> AdapterMatrix:
    name, rows, columns = shape
    taken, own_columns = matrix_part(name.rpartition(".")[2], (rows, columns), arch, shard)
    width = rows if taken is None else len(taken)
    return AdapterMatrix(prefix + name, rows, columns, width, taken, own_columns)


def _half_split(arch: Architecture, matrices: list[AdapterMatrix]) -> list[AdapterMatrix]:
    """The order of q, k, v after the loader has reordered them; rows move within a head of one of them."""
    widths = [matrix.width for matrix in matrices]
    order = half_split_rows(arch, torch.arange(sum(widths)))
    starts = torch.tensor([0, *widths[:-1]]).cumsum(0)
    found = []
    for matrix, rows, start in zip(matrices, order.split_with_sizes(widths), starts, strict=True):
        own = torch.arange(matrix.rows) if matrix.taken is None else matrix.taken
        taken = own[rows - start]
        found.append(
            AdapterMatrix(matrix.module, matrix.rows, matrix.columns, matrix.width, taken, matrix.own_columns)
        )
    return found
