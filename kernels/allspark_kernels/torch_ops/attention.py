"""Causal attention over a span-paged KV cache, ragged over requests.

The unit of work is a pair (query tile, span). Each pair yields a partial softmax (maximum, normaliser,
weighted sum); the pairs of a tile are merged with the online-softmax recurrence (Milakov and
Gimelshein, 2018; Dao, 2023). So nothing is padded to the longest request and no Python loop runs over
requests: the only loop is over chunks of pairs, which bounds the memory.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..kv_format import CacheMode, cache_mode_of
from ..plan import AttentionPlan, Int32Array
from .kv_quant import load_spans
from .precision import wide

TILE = 32
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TileGroup:
    """Query tiles of one height. tokens, positions [n, height]; the pair arrays are sorted by tile."""

    tokens: torch.Tensor
    positions: torch.Tensor
    is_real: torch.Tensor
    pair_tile: torch.Tensor
    pair_span: torch.Tensor
    pair_first_key: torch.Tensor
    pair_num_keys: torch.Tensor


def prepare_plan(plan: AttentionPlan, _shared: object) -> list[TileGroup]:
    """Cut the step into query tiles: height 1 for single-token requests, ``TILE`` for the others."""
    single = plan.q_lens == 1
    groups = []
    for rows, height in ((np.flatnonzero(single), 1), (np.flatnonzero(~single), TILE)):
        if rows.size:
            groups.append(_group(plan, rows, height))
    return groups


def _group(plan: AttentionPlan, rows: np.ndarray, height: int) -> TileGroup:
    q_lens, kv_lens = plan.q_lens[rows], plan.kv_lens[rows]
    tile_row, tile_index = _expand(-(-q_lens // height))
    first = tile_index * height
    last = np.minimum(first + height, q_lens[tile_row]) - 1
    wanted = first[:, None] + np.arange(height)
    query = np.minimum(wanted, last[:, None])
    positions = (kv_lens - q_lens)[tile_row][:, None] + query
    seen_keys = np.minimum(positions[:, -1] + 1, kv_lens[tile_row])
    pair_tile, pair_index = _expand(-(-seen_keys // plan.span_size))
    spans = plan.span_table[rows[tile_row[pair_tile]], pair_index]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(plan.device)

    return TileGroup(
        tokens=put(plan.cu_q[rows][tile_row][:, None].astype(np.int64) + query),
        positions=put(positions),
        is_real=put(wanted <= last[:, None]),
        pair_tile=put(pair_tile),
        pair_span=put(spans.astype(np.int64)),
        pair_first_key=put(pair_index * plan.span_size),
        pair_num_keys=put(seen_keys[pair_tile] - pair_index * plan.span_size),
    )


def _expand(counts: Int32Array) -> tuple[np.ndarray, np.ndarray]:
    """Row and index in the row of each of ``counts[row]`` items."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """q [T, Hq, D], caches [num_spans, Hk, span_size, D] or quantised -> [T, Hq, D]."""
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    groups: list[TileGroup] = plan.state
    for group in groups:
        values = _attend(q, k_cache, v_cache, group, scale, window, soft_cap)
        out[group.tokens[group.is_real]] = values[group.is_real].to(out.dtype)
    return out


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: TileGroup,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Attention of one group: [n, height, Hq, D]."""
    num_tiles, height = group.tokens.shape
    num_kv_heads, span_size, _ = k_cache.shape[1:]
    dim = q.shape[-1]
    ratio = q.shape[1] // num_kv_heads
    tiles = wide(q[group.tokens]) * scale
    tiles = tiles.view(num_tiles, height, num_kv_heads, ratio, dim).permute(0, 2, 3, 1, 4)
    tiles = tiles.reshape(num_tiles, num_kv_heads, ratio * height, dim)
    top = tiles.new_full((*tiles.shape[:3], 1), float("-inf"))
    total = torch.zeros_like(top)
    sums = torch.zeros_like(tiles)
    row_bytes = (
        tiles.element_size() * num_kv_heads * (ratio * height * (span_size + 2 * dim) + 2 * span_size * dim)
    )
    chunk = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(group.pair_tile), chunk):
        pairs = slice(start, start + chunk)
        owner = group.pair_tile[pairs]
        part = _partial(tiles[owner], k_cache, v_cache, group, pairs, window, soft_cap)
        top, total, sums = _merge((top, total, sums), part, owner)
    result = torch.where(total > 0, sums / total, torch.zeros_like(sums))
    result = result.view(num_tiles, num_kv_heads, ratio, height, dim).permute(0, 3, 1, 2, 4)
    return result.reshape(num_tiles, height, num_kv_heads * ratio, dim)


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _partial(
    tiles: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: TileGroup,
    pairs: slice,
    window: int,
    soft_cap: float,
) -> State:
    """Unnormalised softmax of each pair: maximum [p, Hk, R, 1], normaliser, weighted sum [p, Hk, R, D]."""
    spans = group.pair_span[pairs]
    offsets = torch.arange(k_cache.shape[2], device=spans.device)
    is_written = (offsets < group.pair_num_keys[pairs].unsqueeze(1))[:, None, :, None]
    zero = torch.zeros((), dtype=tiles.dtype, device=tiles.device)
    keys, values = (torch.where(is_written, _read(cache, spans, tiles), zero) for cache in (k_cache, v_cache))
    key_positions = group.pair_first_key[pairs].unsqueeze(1) + offsets
    query_positions = group.positions[group.pair_tile[pairs]]
    visible = key_positions[:, None, :] <= query_positions[:, :, None]
    visible = visible & (offsets < group.pair_num_keys[pairs].unsqueeze(1))[:, None, :]
    if window:
        visible = visible & (key_positions[:, None, :] > query_positions[:, :, None] - window)
    scores = tiles @ keys.transpose(-1, -2)
    if soft_cap:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    ratio = scores.shape[2] // visible.shape[1]
    hidden = ~visible.repeat(1, ratio, 1).unsqueeze(1)
    scores = scores.masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    # A row that sees no key of this span has maximum -inf; exp(-inf - 0) = 0 keeps it out of the sums.
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
    return top, weights.sum(-1, keepdim=True), weights @ values


def _read(cache: torch.Tensor, spans: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Whole spans [p, Hk, span_size, D] as numbers of the dtype of ``like`` [..., D]."""
    if cache_mode_of(cache) == CacheMode.DEFAULT:
        return cache[spans].to(like.dtype)
    return load_spans(cache, spans, like.shape[-1], like.dtype)


def _merge(state: State, part: State, owner: torch.Tensor) -> State:
    """Fold the partial softmaxes of pairs into the running state of the tiles that own them."""
    top, total, sums = state
    part_top, part_total, part_sums = part
    index = owner.view(-1, 1, 1, 1).expand_as(part_top)
    new_top = top.scatter_reduce(0, index, part_top, "amax")
    anchor = new_top.masked_fill(new_top == float("-inf"), 0.0)
    decay = torch.exp(top - anchor)
    weight = torch.exp(part_top - anchor[owner])
    total = (total * decay).index_add_(0, owner, part_total * weight)
    sums = (sums * decay).index_add_(0, owner, part_sums * weight)
    return new_top, total, sums
