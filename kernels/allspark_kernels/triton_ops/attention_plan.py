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
HEADER_INTS = ALIGN_INTS


@dataclass(slots=True, eq=False)
class Workspace:
    """Partial softmax of each work item: sums [items, Hq, D], tops and totals [items, Hq] float32."""

    sums: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor


@dataclass(slots=True, eq=False)
class DecodeWork:
    """Rows with one query token each, cut into splits of SPLIT_KEYS keys.

    rows [capacity, 4] int32: token, where its spans begin, number of keys, first item; items
    [capacity_items, 2] int32: row, split. Items of a row are neighbours and in order. The workspace may have
    room for more items, and may serve other plans in turn.
    """

    rows: torch.Tensor
    items: torch.Tensor
    workspace: Workspace
    num_rows: int
    num_programs: int


@dataclass(slots=True, eq=False)
class PrefillWork:
    """tiles [n, 4] int32: first token, number of tokens, where its spans begin, first position."""

    tiles: torch.Tensor
    num_tiles: int


@dataclass(slots=True, eq=False)
class DeviceWork:
    """Everything the attention kernels read besides q and the caches.

    ``lists`` int32 begins with the number of decode items and the index where the span ids begin; these are
    the end of it, one request's behind the other's without gaps, so that a step moves what it uses and not
    what it could use. Rows and tiles say where among the span ids their request's begin.
    """

    lists: torch.Tensor
    decode: DecodeWork | None
    prefill: PrefillWork | None


def prepare_plan(plan: AttentionPlan, shared: DeviceWork | None) -> DeviceWork:
    """Build the work lists, or refill those of a reserved plan at the same addresses.

    ``shared``: of a plan at least as large, whose workspace a new reserved plan uses too.
    """
    if plan.capacity:
        return _prepare_reserved(plan, shared)
    ratio = plan.num_q_heads // plan.num_kv_heads
    spans, starts = _spans(plan)
    rows, items = _decode_rows(plan, starts)
    tiles = _prefill_tiles(plan, starts, tile_rows(ratio) // ratio)
    buffer, (rows_at, items_at, tiles_at) = _upload([rows, items, tiles], len(items), spans, plan.device)
    workspace = _workspace(plan, len(items)) if len(rows) else None
    return DeviceWork(
        lists=buffer,
        decode=None if workspace is None else _decode_work(plan, rows_at, items_at, workspace),
        prefill=PrefillWork(tiles_at, len(tiles)) if len(tiles) else None,
    )


def tile_rows(ratio: int) -> int:
    """Rows of a prefill tile: query tokens times the ``ratio`` query heads that share a KV head."""
    return max(TILE_ROWS, next_power_of_2(ratio))


def _prepare_reserved(plan: AttentionPlan, shared: DeviceWork | None) -> DeviceWork:
    """All rows of the plan and the used items and spans; the buffer has room for the largest step."""
    spans, starts = _spans(plan)
    rows, items = _decode_rows(plan, starts)
    work: DeviceWork | None = plan.state
    if work is not None:
        _upload([rows, items], len(items), spans, plan.device, into=work.lists)
        return work
    num_items = plan.capacity * -(-plan.max_kv_len // SPLIT_KEYS)
    first_item = HEADER_INTS + _padded(rows.size)
    num_ints = first_item + _padded(2 * num_items) + plan.span_table.size
    buffer = torch.zeros(num_ints, dtype=torch.int32, device=plan.device)
    _, (rows_at, _) = _upload([rows, items], len(items), spans, plan.device, into=buffer)
    items_at = buffer[first_item : first_item + 2 * num_items].view(num_items, 2)
    lent = None if shared is None or shared.decode is None else shared.decode.workspace
    workspace = _workspace(plan, num_items) if lent is None else lent
    room = workspace.sums.shape
    if room[0] < num_items or room[1:] != (plan.num_q_heads, plan.head_dim):
        raise ValueError(f"the shared workspace {list(room)} does not fit {num_items} items of this plan")
    return DeviceWork(buffer, _decode_work(plan, rows_at, items_at, workspace), None)


def _spans(plan: AttentionPlan) -> tuple[Int32Array, Int32Array]:
    """The span ids in use, request by request [n], and where each request's begin among them [B]."""
    counts = -(-plan.kv_lens // plan.span_size)
    is_used = np.arange(plan.span_table.shape[1])[None, :] < counts[:, None]
    return plan.span_table[is_used], (np.cumsum(counts) - counts).astype(np.int32)


def _decode_rows(plan: AttentionPlan, starts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Rows [n, 4] (see ``DecodeWork``) of the query tokens that take the decode kernel, and their items."""
    request, index = _expand(plan.decode_lens)
    behind_end = plan.decode_lens[request] - index
    tokens = plan.cu_q[request + 1] - behind_end
    # A padding row of a reserved plan has no keys.
    num_keys = np.maximum(plan.kv_lens[request] - behind_end + 1, 0)
    splits = -(-num_keys // SPLIT_KEYS)
    row, split = _expand(splits)
    rows = np.column_stack((tokens, starts[request], num_keys, np.cumsum(splits) - splits))
    return rows.astype(np.int32), np.column_stack((row, split)).astype(np.int32)


def _prefill_tiles(plan: AttentionPlan, starts: Int32Array, tokens_per_tile: int) -> Int32Array:
    """Tiles of prompt tokens, the longest work first so that the last to start is short."""
    lens = plan.q_lens - plan.decode_lens
    request, index = _expand(-(-lens // tokens_per_tile))
    first = index * tokens_per_tile
    count = np.minimum(lens[request] - first, tokens_per_tile)
    position = (plan.kv_lens - plan.q_lens)[request] + first
    tiles = np.column_stack((plan.cu_q[request] + first, count, starts[request], position)).astype(np.int32)
    return np.ascontiguousarray(tiles[np.argsort(-tiles[:, 3], kind="stable")])


def _expand(counts: Int32Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Row, and index inside the row, of each of ``counts[row]`` items."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]


def _workspace(plan: AttentionPlan, num_items: int) -> Workspace:
    heads, device = plan.num_q_heads, plan.device
    shapes = ((num_items, heads, plan.head_dim), (num_items, heads), (num_items, heads))
    return Workspace(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def _decode_work(
    plan: AttentionPlan, rows: torch.Tensor, items: torch.Tensor, workspace: Workspace
) -> DecodeWork:
    processors = INTERPRETER_PROCESSORS
    if plan.device.type == "cuda":
        processors = torch.cuda.get_device_properties(plan.device).multi_processor_count
    programs = max(1, processors * PROGRAMS_PER_PROCESSOR // plan.num_kv_heads)
    return DecodeWork(rows, items, workspace, len(rows), min(programs, len(items)))


def _padded(size: int) -> int:
    """Ints that an array of ``size`` takes: each begins at a multiple of 16 bytes.

    So pointers keep the alignment that kernels are specialised for.
    """
    return -(-size // ALIGN_INTS) * ALIGN_INTS


def _upload(
    arrays: list[Int32Array],
    num_items: int,
    spans: Int32Array,
    device: torch.device,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy header, arrays and span ids to the device in one transfer; the host does not wait for it.

    Returns the buffer (``into`` where given) and its views of the arrays. The caching allocator of pinned
    memory keeps the source until the transfer is over.
    """
    sizes = [_padded(array.size) for array in arrays]
    ends = HEADER_INTS + np.cumsum(sizes)
    first_span = int(ends[-1])
    num_ints = first_span + spans.size
    host = torch.empty(num_ints, dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    flat[:2] = num_items, first_span
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        flat[end - size : end - size + array.size] = array.ravel()
    flat[first_span:] = spans
    if into is None:
        buffer = host.to(device, non_blocking=True)
    else:
        buffer = into
        buffer[:num_ints].copy_(host, non_blocking=True)
    return buffer, [
        buffer[end - size : end - size + array.size].view(array.shape)
        for array, end, size in zip(arrays, ends, sizes, strict=True)
    ]
