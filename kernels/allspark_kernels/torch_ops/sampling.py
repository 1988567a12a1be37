"""Next-token selection: penalties, bans, mask, top-k, top-p and the seeded draw, in this order.

The draw is argmax(x / T + Gumbel noise) over the kept ids, which has the distribution softmax(x / T) and
equals the exponential race argmax(q_i / E_i); the noise is a pure function of (seed, position, id).
"""

import torch

from ..types import SamplingBatch
from .philox import gumbel

BANNED = -1e9
PROMPT, GENERATED = 1, 2


def sample(logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor:
    """logits [B, V] (modified in place) -> ids [B] int64; -1 for a row without any candidate."""
    process(logits, p)
    greedy = torch.where(logits == logits.amax(-1, keepdim=True), 1, 0).argmax(-1)
    is_random = p.temperature > 0
    chosen = greedy
    if bool(is_random.any()):
        drawn = draw(logits, p, keep(logits, p))
        chosen = torch.where(is_random, drawn, greedy)
    return torch.where(logits.amax(-1) > float("-inf"), chosen, -1)


def process(logits: torch.Tensor, p: SamplingBatch) -> None:
    """Apply penalties, bans and mask to ``logits`` in place; NaN becomes -inf, so it is never chosen."""
    logits.masked_fill_(logits.isnan(), float("-inf"))
    if p.seen is not None:
        _penalise(logits, p, p.seen[p.slot.long()])
    if len(p.ban_rows):
        logits[p.ban_rows, p.ban_ids] = BANNED
    if p.allow_mask is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        allowed = (p.allow_mask[:, ids // 32] >> (ids % 32).to(torch.int32)) & 1
        logits.masked_fill_(allowed == 0, float("-inf"))


def _penalise(logits: torch.Tensor, p: SamplingBatch, seen: torch.Tensor) -> None:
    generated = (seen & GENERATED) != 0
    repeated = torch.where(p.suppress_repetition.unsqueeze(1), generated, seen != 0)
    factor = p.repetition_penalty.to(logits.dtype).unsqueeze(1)
    scaled = torch.where(logits < 0, logits * factor, logits / factor)
    penalised = torch.where(repeated, scaled, logits)
    logits.copy_(penalised - generated * p.presence_penalty.to(logits.dtype).unsqueeze(1))


def keep(logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor:
    """Which ids [B, V] survive top-k (ties: smaller id) and then top-p."""
    vocab = logits.shape[1]
    top_k = torch.where((p.top_k <= 0) | (p.top_k > vocab), vocab, p.top_k).long()
    use_top_p = (p.top_p > 0) & (p.top_p < 1) & (p.temperature > 0)
    kept = (
        _keep_top_k(logits, top_k)
        if bool((top_k < vocab).any())
        else torch.ones_like(logits, dtype=torch.bool)
    )
    if bool(use_top_p.any()):
        longest = int(top_k[use_top_p].max())
        kept = torch.where(use_top_p.unsqueeze(1), _keep_top_p(logits, kept, p, longest), kept)
    return kept


def _keep_top_k(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """The top_k[b] best of each row: all above the k-th value, then the smallest ids that equal it."""
    vocab = logits.shape[1]
    limited = torch.where(top_k < vocab, top_k, 1)
    best = logits.topk(int(limited.max())).values
    threshold = best.gather(1, (limited - 1).unsqueeze(1))
    above = logits > threshold
    ties = logits == threshold
    room = limited - above.sum(-1)
    kept = above | (ties & (ties.cumsum(-1) <= room.unsqueeze(1)))
    return kept | (top_k == vocab).unsqueeze(1)


def _keep_top_p(logits: torch.Tensor, kept: torch.Tensor, p: SamplingBatch, longest: int) -> torch.Tensor:
    """The shortest best-first prefix of the kept ids whose probability exceeds top_p."""
    scores = logits.masked_fill(~kept, float("-inf"))
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :longest].double(), ids[:, :longest]
    temperature = p.temperature.double().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    probs = torch.softmax((values - values[:, :1]) / temperature, dim=-1)
    mass_before = probs.cumsum(-1) - probs
    inside = (mass_before <= p.top_p.double().unsqueeze(1)) & (values > float("-inf"))
    return torch.zeros_like(kept).scatter_(1, ids, inside)


def draw(logits: torch.Tensor, p: SamplingBatch, kept: torch.Tensor) -> torch.Tensor:
    """argmax over kept ids of x / T + Gumbel noise; ties: smaller id."""
    rows, ids = kept.nonzero(as_tuple=True)
    noise = gumbel(ids, p.seed[rows], p.position[rows])
    temperature = p.temperature.double().clamp_min(torch.finfo(torch.float32).tiny)
    scores = torch.full(logits.shape, float("-inf"), dtype=torch.float64, device=logits.device)
    scores[rows, ids] = logits[rows, ids].double() / temperature[rows] + noise
    return torch.where(scores == scores.amax(-1, keepdim=True), 1, 0).argmax(-1)


def mark_seen(seen: torch.Tensor, slot: int | torch.Tensor, ids: torch.Tensor, bit: int) -> None:
    """seen[slot, ids] |= bit; ids < 0 are skipped."""
    kept = ids >= 0
    if isinstance(slot, int):
        ids = ids[kept].long()
        seen[slot, ids] |= bit
    else:
        rows, ids = slot[kept].long(), ids[kept].long()
        seen[rows, ids] |= bit
