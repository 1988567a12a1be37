"""Which matrices of a decoder adapters can reach, and how the model packs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from allspark_kernels import PackedLinear

from allspark_workers.models.decoder import Decoder, DenseMlp
from allspark_workers.models.families import FAMILIES
from allspark_workers.models.rope import half_split_rows

# Packed layer, modules, their widths, the order of their rows.
_Pack = tuple[PackedLinear, tuple[str, ...], tuple[int, ...], torch.Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSite:
    """One packed layer: `modules` are the names of the matrices whose outputs it stacks, `widths` their rows.

    `orders`: per module the index [width] int64 that brings its rows into the packed order, None: as they
    are. A site does not hold the layer itself: adapters must not keep weights in memory that the model has
    given up.
    """

    modules: tuple[str, ...]
    widths: tuple[int, ...]
    in_features: int
    orders: tuple[torch.Tensor | None, ...]


def adapter_sites(decoder: Decoder) -> list[tuple[AdapterSite, PackedLinear]]:
    """The sites of all layers and the packed layers they stand for, in a fixed order."""
    arch, names = decoder.arch, FAMILIES[decoder.arch.family].names
    heads, kv_heads = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    wide, hidden = arch.intermediate_size, arch.hidden_size
    order = half_split_rows(arch, torch.arange(heads + 2 * kv_heads)) if arch.is_rope_interleaved else None
    qkv = tuple(f"self_attn.{name}" for name in names.qkv)
    gate_up = tuple(f"mlp.{name}" for name in names.gate_up)
    sites = []
    for index, layer in enumerate(decoder.layers):
        packs: list[_Pack] = [
            (layer.qkv, qkv, _split([heads, kv_heads, kv_heads], qkv), order),
            (layer.output, ("self_attn.o_proj",), (hidden,), None),
        ]
        if isinstance(layer.mlp, DenseMlp):  # adapters of single experts are not served
            packs += [
                (layer.mlp.gate_up, gate_up, _split([wide, wide], gate_up), None),
                (layer.mlp.down, ("mlp.down_proj",), (hidden,), None),
            ]
        for packed, modules, widths, rows in packs:
            full = tuple(f"model.layers.{index}.{name}" for name in modules)
            sites.append((AdapterSite(full, widths, packed.in_features, _orders(rows, widths)), packed))
    return sites


def _split(rows: list[int], modules: tuple[str, ...]) -> tuple[int, ...]:
    """One width per module; a checkpoint that stores one matrix for all has all its rows there."""
    return tuple(rows) if len(modules) > 1 else (sum(rows),)


def _orders(rows: torch.Tensor | None, widths: tuple[int, ...]) -> tuple[torch.Tensor | None, ...]:
    """The packed order cut to the modules: rows only move within the heads of one of them."""
    if rows is None:
        return (None,) * len(widths)
    starts = torch.tensor([0, *widths[:-1]]).cumsum(0)
    return tuple(
        part - start for part, start in zip(rows.split_with_sizes(list(widths)), starts, strict=True)
    )
