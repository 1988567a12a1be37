"""The best continuations of each beam, from its logits.

As in transformers, penalties and bans act on log-probabilities, and the 2 * num_beams best continuations of
every beam are enough: at most one of them ends at eos, so num_beams can go on. With `do_sample` they are
drawn without replacement (Gumbel top-k: Kool, van Hoof and Welling, 2019), again from every beam separately.
"""

from __future__ import annotations

import numpy as np
import torch
from allspark_kernels.torch_ops.philox import gumbel

from allspark_workers.engine.beams import Candidates
from allspark_workers.engine.sequence import Sequence

_MIN_KEPT = 2  # top_k and top_p leave a beam eos and one more


def beam_candidates(logits: torch.Tensor, sequences: list[Sequence]) -> list[Candidates | None]:
    """Candidates of each sequence from logits [B, V] float32; None where some logit is not a number."""
    # In float64, so that the order of the sum, which may depend on where a row lies, leaves no trace.
    wide = logits.double()
    scores = (wide - wide.logsumexp(-1, keepdim=True)).float()
    keys = scores.clone() if any(seq.sampling[0] for seq in sequences) else scores
    for row, seq in enumerate(sequences):
        if seq.uses_penalties or seq.constraints.may_ban or seq.sampling[0]:
            scores[row] = _processed(scores[row], seq)
        if seq.sampling[0]:
            keys[row] = scores[row] + _noise(scores[row], seq)
        elif keys is not scores:
            keys[row] = scores[row]
    counts = [min(2 * seq.request.params.num_beams, scores.shape[1]) for seq in sequences]
    return _best(scores, keys, counts)


def _best(scores: torch.Tensor, keys: torch.Tensor, counts: list[int]) -> list[Candidates | None]:
    """The counts[b] best of each row by key; among equal keys the smaller id, whatever the other rows are."""
    index = torch.tensor([[count - 1] for count in counts], dtype=torch.int64, device=keys.device)
    # Which of several equal values topk returns is not defined, but the smallest value is.
    least = keys.topk(max(counts)).values.gather(1, index)
    rows, ids = (keys >= least).nonzero(as_tuple=True)
    found_keys, found_scores = keys[rows, ids].cpu().numpy(), scores[rows, ids].cpu().numpy()
    ends = np.cumsum(np.bincount(rows.cpu().numpy(), minlength=len(counts)))
    tokens = ids.cpu().numpy()
    results: list[Candidates | None] = []
    for start, end, count in zip(np.r_[0, ends[:-1]], ends, counts, strict=True):
        own = slice(int(start), int(end))
        order = np.argsort(-found_keys[own], kind="stable")[:count]
        found = Candidates(tokens[own][order], found_scores[own][order], found_keys[own][order])
        # Nothing compares with NaN: a row that has one yields nothing.
        results.append(found if len(order) == count else None)
    return results


def _processed(log_probs: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """Penalties, bans and, when drawing, temperature, top-k and top-p, in this order."""
    params = seq.request.params
    if seq.uses_penalties:
        generated = _distinct(seq.generated(), log_probs.device)
        repeated = generated
        if not params.suppress_repetition:
            repeated = _distinct(seq.tokens[: seq.length], log_probs.device)
        log_probs[repeated] *= params.repetition_penalty  # no log-probability is positive
        log_probs[generated] -= params.presence_penalty
    if seq.constraints.may_ban:
        banned = torch.tensor(sorted(seq.constraints.banned(seq)), dtype=torch.int64)
        log_probs[banned.to(log_probs.device)] = float("-inf")
    if not seq.sampling[0]:
        return log_probs
    scores = log_probs / params.temperature
    return _keep_top_p(_keep_top_k(scores, params.top_k), params.top_p)


def _distinct(tokens: np.ndarray[tuple[int], np.dtype[np.int64]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.unique(tokens)).to(device)


def _keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    if not 0 < top_k < scores.shape[0]:
        return scores
    least = scores.topk(max(top_k, _MIN_KEPT)).values[-1]
    return scores.masked_fill(scores < least, float("-inf"))


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The shortest best-first prefix whose probability exceeds top_p."""
    if not 0 < top_p < 1:
        return scores
    values, ids = scores.sort(descending=True, stable=True)
    probs = values.double().softmax(-1)
    outside = probs.cumsum(-1) - probs > top_p
    outside[:_MIN_KEPT] = False
    return scores.index_fill(0, ids[outside], float("-inf"))


def _noise(scores: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """Gumbel noise of every token: a function of the beam's seed, its length and the token."""
    ids = torch.arange(scores.shape[0], device=scores.device)
    seed, position = torch.full_like(ids, seq.request.params.seed), torch.full_like(ids, seq.length)
    return gumbel(ids, seed, position).float()
