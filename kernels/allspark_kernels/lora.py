"""Low-rank adapters (Hu et al., 2021) of linear layers: where their weights lie, and which rows use which.

A packed layer stacks the outputs of several matrices (q, k, v; gate, up): its *parts*. An adapter has its own
pair of matrices for each part, so with all scaling folded into B

    y[:, part] += (x A_part^T) B_part^T

Adapters live in numbered slots. Kernels find the weights of a slot through a table of addresses in the memory
of the device, so that adapters of any rank share one launch and none of them is copied together with others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from .types import FLOAT_DTYPES

MAX_PARTS: Final = 3
NO_ADAPTER: Final = -1
#: Rows of one tile; it decides which rows share a load of the weights, and enters no sum.
TILE_ROWS: Final = 16
# One table entry, int64: address of A; of each part's B; each part's rank; nothing.
ENTRY_WORDS: Final = 8
_FIRST_UP, _FIRST_RANK = 1, 1 + MAX_PARTS
_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """One adapter's matrices for one packed layer.

    down [sum of ranks, K]: the A matrices of the parts, stacked. ups: per part B transposed, times the
    scaling: [rank of the part, N of the part]; a part without adapter has rank 0. All are contiguous and of
    one float dtype.
    """

    down: torch.Tensor
    ups: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.down.nbytes + sum(up.nbytes for up in self.ups)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each part."""
        return tuple(up.shape[0] for up in self.ups)


class LoraSite:
    """The adapters of one packed layer [sum of widths, in_features]; made by ``LoraTable`` alone.

    `weights[slot]` holds the matrices of a slot or None, `entries` [num_slots, ENTRY_WORDS] int64 their
    addresses on the device. `max_rank`: the largest stacked rank of any slot. `width_list` [MAX_PARTS] int64
    on the host: the widths, then zeros.
    """

    def __init__(
        self, in_features: int, widths: tuple[int, ...], entries: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self.in_features = in_features
        self.widths = widths
        self.width_list = torch.tensor([*widths, 0, 0][:MAX_PARTS])
        self.out_features = sum(widths)
        self.dtype = dtype
        self.entries = entries
        self.weights: list[LoraWeights | None] = [None] * entries.shape[0]
        self.max_rank = 0


class LoraTable:
    """Slots for `num_slots` adapters over the packed layers of a model.

    `shapes`: in_features and the widths of the parts (at most three) of each layer. Not thread-safe: `put`
    and `clear` belong to the thread that runs the kernels, between two steps.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, tuple[int, ...]]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_slots < 1 or dtype not in FLOAT_DTYPES:
            raise ValueError(f"a table needs at least one slot and a float dtype, not {num_slots}, {dtype}")
        if any(not 1 <= len(widths) <= MAX_PARTS for _, widths in shapes):
            raise ValueError(f"a packed layer has 1 to {MAX_PARTS} parts")
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        size = (len(shapes), num_slots, ENTRY_WORDS)
        self._host: NDArray[np.int64] = np.zeros(size, np.int64)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self.sites = [
            LoraSite(k, widths, entries, dtype)
            for (k, widths), entries in zip(shapes, self._device.unbind(0), strict=True)
        ]

    def put(self, slot: int, weights: Sequence[LoraWeights | None]) -> None:
        """Fill a slot: the matrices of every site, or None where the adapter has none.

        Raises ValueError, with nothing changed, if their shapes, dtype, device or layout do not fit.
        """
        for site, own in zip(self.sites, weights, strict=True):
            if own is not None:
                self._check(site, own)
        for index, (site, own) in enumerate(zip(self.sites, weights, strict=True)):
            site.weights[slot] = own
            site.max_rank = max((sum(w.ranks) for w in site.weights if w is not None), default=0)
            self._host[index, slot] = 0 if own is None else _entry(own)
        self._device[:, slot].copy_(torch.from_numpy(self._host[:, slot].copy()))

    def clear(self, slot: int) -> None:
        """Empty a slot; its matrices are dropped."""
        self.put(slot, [None] * len(self.sites))

    def _check(self, site: LoraSite, own: LoraWeights) -> None:
        shapes = [(sum(own.ranks), site.in_features)]
        shapes += [(up.shape[0], width) for up, width in zip(own.ups, site.widths, strict=True)]
        for x, shape in zip((own.down, *own.ups), shapes, strict=True):
            if x.shape != shape or x.dtype != self.dtype or x.device != self.device:
                raise ValueError(
                    f"an adapter's matrix must be {self.dtype} {list(shape)} on {self.device}, "
                    f"not {x.dtype} {list(x.shape)} on {x.device}"
                )
            if not x.is_contiguous() or x.data_ptr() % _ALIGN_BYTES:
                raise ValueError("an adapter's matrices must be contiguous and aligned")


def _entry(own: LoraWeights) -> NDArray[np.int64]:
    entry = np.zeros(ENTRY_WORDS, np.int64)
    entry[0] = own.down.data_ptr()
    for part, up in enumerate(own.ups):
        entry[_FIRST_UP + part] = up.data_ptr()
        entry[_FIRST_RANK + part] = up.shape[0]
    return entry


@dataclass(frozen=True, slots=True, eq=False)
class LoraPlan:
    """Which rows of a step of `num_tokens` rows use which slot.

    rows [M] int32 on the device: the rows with an adapter, those of a slot together. groups: (slot, first
    index into rows, count), on the host. tiles [n, 3] int32 on the device: the groups cut to TILE_ROWS.
    """

    num_tokens: int
    rows: torch.Tensor
    groups: tuple[tuple[int, int, int], ...]
    tiles: torch.Tensor


def plan_lora(
    slots: Sequence[int] | NDArray[np.int64], counts: Sequence[int] | NDArray[np.int64], device: torch.device
) -> LoraPlan | None:
    """The plan of a step of requests with `counts` rows each, the first request's rows first.

    slots: of each request, NO_ADAPTER for the base model. None if no row has an adapter.
    """
    of_row = np.repeat(np.asarray(slots, np.int64), np.asarray(counts, np.int64))
    order = np.argsort(of_row, kind="stable")
    rows = order[np.searchsorted(of_row[order], 0) :].astype(np.int32)
    if not len(rows):
        return None
    used, starts, sizes = np.unique(of_row[rows], return_index=True, return_counts=True)
    groups = tuple(zip(used.tolist(), starts.tolist(), sizes.tolist(), strict=True))
    tiles = [
        (slot, start + first, min(TILE_ROWS, count - first))
        for slot, start, count in groups
        for first in range(0, count, TILE_ROWS)
    ]
    return LoraPlan(
        num_tokens=len(of_row),
        rows=torch.from_numpy(rows).to(device),
        groups=groups,
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
    )
