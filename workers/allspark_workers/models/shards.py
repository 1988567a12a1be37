"""Which part of a model one rank holds (Shoeybi et al., 2019, arXiv 1909.08053).

Attention heads and the MLP's inner dimension are cut, so that a block needs two sums over the ranks; the
output matrix is cut by vocabulary. Embedding and norms are whole everywhere. With fewer KV heads than ranks,
each KV head is held by several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from allspark_workers.engine.errors import UnsupportedModelError
from allspark_workers.models.architecture import Architecture, MoeParams
from allspark_workers.models.source import WeightSource

# "gate" (the router) and "shared_expert_gate" among them: every rank routes alike.
_WHOLE = ("embed_tokens", "norm", "layernorm", "gate")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size`."""

    rank: int
    size: int

    def part(self, count: int) -> slice:
        """This rank's share of `count` things, nearly equal over the ranks."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def widths(self, count: int) -> list[int]:
        """How many of `count` things each rank has."""
        ends = [count * rank // self.size for rank in range(self.size + 1)]
        return [end - start for start, end in pairwise(ends)]

    def kv_heads(self, count: int) -> slice:
        """This rank's KV heads of `count`; ranks share one if there are fewer heads than ranks."""
        if count >= self.size:
            return self.part(count)
        head = self.rank * count // self.size
        return slice(head, head + 1)

    def _experts(self, moe: MoeParams) -> MoeParams:
        return replace(
            moe, expert_size=moe.expert_size // self.size, shared_size=moe.shared_size // self.size
        )

    def architecture(self, arch: Architecture) -> Architecture:
        """What this rank computes. Raises UnsupportedModelError if the model cannot be cut into `size`."""
        kv = arch.num_kv_heads
        if arch.num_heads % self.size or (kv % self.size and self.size % kv):
            raise UnsupportedModelError(
                f"{arch.num_heads} heads and {kv} KV heads cannot be divided over {self.size} devices"
            )
        moe = arch.moe
        widths = [arch.intermediate_size] if moe is None or not all(moe.is_sparse) else []
        widths += [] if moe is None else [moe.expert_size, moe.shared_size]
        for width in widths:
            if width % self.size:
                raise UnsupportedModelError(f"an MLP of {width} cannot be divided over {self.size} devices")
        heads = self.kv_heads(kv)
        return replace(
            arch,
            num_heads=arch.num_heads // self.size,
            num_kv_heads=heads.stop - heads.start,
            intermediate_size=max(1, arch.intermediate_size // self.size),
            moe=None if moe is None else self._experts(moe),
        )


class ShardedSource:
    """A checkpoint as one rank sees it: the same names, its part of each tensor."""

    def __init__(self, source: WeightSource, arch: Architecture, shard: Shard) -> None:
        self.dtype = source.dtype
        self.location = source.location
        self._source = source
        self._arch = arch
        self._shard = shard

    def names(self) -> frozenset[str]:
        """All tensor names."""
        return self._source.names()

    def stored(self, name: str) -> None:
        """Nothing here is kept quantised."""

    def stored_bytes(self) -> int:
        """None of it."""
        return 0

    def get(self, name: str) -> torch.Tensor:
        """This rank's part. Raises UnsupportedModelError for a tensor that is not known how to cut."""
        tensor = self._source.get(name)
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "bias":
            kind = module.rpartition(".")[2]
        arch, shard = self._arch, self._shard
        wide = shard.part(self._inner_width(name))
        match kind:
            case "q_proj":
                return tensor[self._q_rows]
            case "k_proj" | "v_proj":
                return tensor[self._kv_rows]
            case "qkv_proj":
                rows = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
                q, k, v = tensor.split_with_sizes([rows[0], rows[1], rows[1]])
                return torch.cat((q[self._q_rows], k[self._kv_rows], v[self._kv_rows]))
            case "gate_proj" | "up_proj":
                return tensor[wide]
            case "gate_up_proj":
                return torch.cat([part[wide] for part in tensor.chunk(2)])
            case "o_proj" | "down_proj" if tensor.ndim == 1:
                return tensor if shard.rank == 0 else torch.zeros_like(tensor)  # added once
            case "o_proj":
                return tensor[:, self._q_rows]
            case "down_proj":
                return tensor[:, wide]
            case "lm_head":
                return tensor[shard.part(arch.vocab_size)]
            case _ if kind.endswith(_WHOLE):
                return tensor
        raise UnsupportedModelError(
            f"{arch.family} models run on one device only: how to divide {name} is not known"
        )

    def _inner_width(self, name: str) -> int:
        """Width of the MLP, expert or shared expert that a tensor belongs to."""
        moe = self._arch.moe
        if moe is not None and ".experts." in name:
            return moe.expert_size
        if moe is not None and ".shared_expert." in name:
            return moe.shared_size
        return self._arch.intermediate_size

    @property
    def _q_rows(self) -> slice:
        return _scaled(self._shard.part(self._arch.num_heads), self._arch.head_dim)

    @property
    def _kv_rows(self) -> slice:
        return _scaled(self._shard.kv_heads(self._arch.num_kv_heads), self._arch.head_dim)


def _scaled(heads: slice, dim: int) -> slice:
    return slice(heads.start * dim, heads.stop * dim)


def matrix_part(
    kind: str, shape: tuple[int, int], arch: Architecture, shard: Shard
) -> tuple[torch.Tensor | None, slice]:
    """What a rank holds of a matrix [rows, columns]: the index of its rows (None: all), and its columns.

    `kind`: last part of the matrix's name; `arch` is the whole model's. The same cut as ShardedSource's.
    """
    everything = slice(None)
    if shard.size == 1:
        return None, everything
    heads, kv_heads = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    q = _scaled(shard.part(arch.num_heads), arch.head_dim)
    kv = _scaled(shard.kv_heads(arch.num_kv_heads), arch.head_dim)
    rows, columns = shape
    index = torch.arange(rows)
    match kind:
        case "q_proj":
            return index[q], everything
        case "k_proj" | "v_proj":
            return index[kv], everything
        case "qkv_proj":
            parts = index.split_with_sizes([heads, kv_heads, kv_heads])
            return torch.cat((parts[0][q], parts[1][kv], parts[2][kv])), everything
        case "gate_proj" | "up_proj":
            return index[shard.part(rows)], everything
        case "gate_up_proj":
            return torch.cat([part[shard.part(rows // 2)] for part in index.chunk(2)]), everything
        case "o_proj":
            return None, q
        case "down_proj":
            return None, shard.part(columns)
        case "shared_expert_gate":
            return None, everything
    raise UnsupportedModelError(f"adapters of {kind} run on one device only")
