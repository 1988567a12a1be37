"""Device side of an attention plan: work lists and workspaces of the decode and the prefill kernel."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..plan import AttentionPlan, Int32Array
from .variant import next_power_of_2

# Keys of one split of a decode row. Fixed, because it decides how sums are grouped.
SPLIT_KEYS = 256
MIN_DOT_ROWS = 16
TILE_ROWS = 64
PROGRAMS_PER_PROCESSOR = 4
INTERPRETER_PROCESSORS = 2
ALIGN_INTS = 4


@dataclass(slots=True, eq=False)
class DecodeWork:
    """Rows with one query token each, cut into splits of SPLIT_KEYS keys.

    rows [capacity, 4] int32: token, request, number of keys, first item; items [capacity_items, 2] int32:
    row, split; counts [1] int32: number of items. Items of a row are neighbours and in order. The
    workspace holds each item's partial softmax: sums [items, Hq, D], tops and totals [items, Hq] float32.
    """

    rows: torch.Tensor
    items: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor
    num_rows: int
    num_programs: int


@dataclass(slots=True, eq=False)
class PrefillWork:
    """tiles [n, 4] int32: first token, number of tokens, request, position of the first token."""

    tiles: torch.Tensor
    num_tiles: int


@dataclass(slots=True, eq=False)
class DeviceWork:
    """Everything the attention kernels read besides q and the caches; ``lists`` are views of one buffer."""

    lists: list[torch.Tensor]
    span_table: torch.Tensor
    decode: DecodeWork | None
    prefill: PrefillWork | None


def prepare_plan(plan: AttentionPlan) -> DeviceWork:
    """Build the work lists, or refill those of a reserved plan at the same addresses."""
    if plan.capacity:
        return _prepare_reserved(plan)
    ratio = plan.num_q_heads // plan.num_kv_heads
    decode = _decode_rows(plan)
    first, items = _split_rows(decode[:, 2])
    rows = np.column_stack((decode, first))
    tiles = _prefill_tiles(plan, tile_rows(ratio) // ratio)
    counts = np.array([len(items)], np.int32)
    lists = _upload([counts, rows, items, tiles, plan.span_table], plan.device)
    return DeviceWork(
        lists=lists,
        span_table=lists[4],
        decode=_decode_work(plan, lists) if len(rows) else None,
        prefill=PrefillWork(lists[3], len(tiles)) if len(tiles) else None,
    )


def tile_rows(ratio: int) -> int:
    """Rows of a prefill tile: query tokens times the ``ratio`` query heads that share a KV head."""
    return max(TILE_ROWS, next_power_of_2(ratio))


def _prepare_reserved(plan: AttentionPlan) -> DeviceWork:
    tokens = np.arange(plan.capacity, dtype=np.int32)
    first, used = _split_rows(plan.kv_lens)
    items = np.zeros((plan.capacity * -(-plan.max_kv_len // SPLIT_KEYS), 2), np.int32)
    items[: len(used)] = used
    rows = np.column_stack((tokens, tokens, plan.kv_lens, first))
    arrays = [np.array([len(used)], np.int32), rows, items, plan.span_table]
    work: DeviceWork | None = plan.state
    if work is None:
        lists = _upload(arrays, plan.device)
        return DeviceWork(lists, lists[3], _decode_work(plan, lists), None)
    _upload(arrays, plan.device, into=work.lists)
    return work


def _decode_rows(plan: AttentionPlan) -> npt.NDArray[np.int32]:
    """token, request, number of keys of every query token that takes the decode kernel: [n, 3]."""
    request, index = _expand(plan.decode_lens)
    behind_end = plan.decode_lens[request] - index
    tokens = plan.cu_q[request + 1] - behind_end
    return np.column_stack((tokens, request, plan.kv_lens[request] - behind_end + 1)).astype(np.int32)


def _split_rows(num_keys: Int32Array) -> tuple[Int32Array, Int32Array]:
    """First item of each row [n], and the items (row, split) [m, 2]."""
    splits = -(-num_keys // SPLIT_KEYS)
    row, split = _expand(splits)
    return (np.cumsum(splits) - splits).astype(np.int32), np.column_stack((row, split)).astype(np.int32)


def _prefill_tiles(plan: AttentionPlan, tokens_per_tile: int) -> Int32Array:
    """Tiles of prompt tokens, the longest work first so that the last to start is short."""
    lens = plan.q_lens - plan.decode_lens
    request, index = _expand(-(-lens // tokens_per_tile))
    first = index * tokens_per_tile
    count = np.minimum(lens[request] - first, tokens_per_tile)
    position = (plan.kv_lens - plan.q_lens)[request] + first
    tiles = np.column_stack((plan.cu_q[request] + first, count, request, position)).astype(np.int32)
    return np.ascontiguousarray(tiles[np.argsort(-tiles[:, 3], kind="stable")])


def _expand(counts: Int32Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Row, and index inside the row, of each of ``counts[row]`` items."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]


def _decode_work(plan: AttentionPlan, lists: list[torch.Tensor]) -> DecodeWork:
    heads, dim, device = plan.num_q_heads, plan.head_dim, plan.device
    counts, rows, items = lists[:3]
    num_items = len(items)
    processors = INTERPRETER_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    programs = max(1, processors * PROGRAMS_PER_PROCESSOR // plan.num_kv_heads)
    return DecodeWork(
        rows=rows,
        items=items,
        counts=counts,
        sums=torch.empty((num_items, heads, dim), dtype=torch.float32, device=device),
        tops=torch.empty((num_items, heads), dtype=torch.float32, device=device),
        totals=torch.empty((num_items, heads), dtype=torch.float32, device=device),
        num_rows=len(rows),
        num_programs=min(programs, num_items),
    )


def _upload(
    arrays: list[npt.NDArray[np.int32]], device: torch.device, into: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Copy int32 arrays to the device in one transfer that does not block the host.

    Every array begins at a multiple of 16 bytes, so that pointers keep the alignment kernels are
    specialised for. With ``into``, the result of an earlier call with the same shapes is overwritten.
    """
    sizes = [-(-array.size // ALIGN_INTS) * ALIGN_INTS for array in arrays]
    ends = np.cumsum(sizes)
    host = torch.zeros(int(ends[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        flat[end - size : end - size + array.size] = array.ravel()
    if into is not None:
        buffer = into[0]._base
        assert buffer is not None
        buffer.copy_(host, non_blocking=True)
        return into
    buffer = host.to(device, non_blocking=True) if device.type == "cuda" else host
    return [
        buffer[end - size : end - size + array.size].view(array.shape)
        for array, end, size in zip(arrays, ends, sizes, strict=True)
    ]
