"""Sampling against a reference that sorts and loops: rules, ties, and the distribution of the draws."""

import allspark_kernels as kernels
import pytest
import torch
from allspark_kernels.torch_ops.philox import gumbel
from kernel_helpers import F32, Place, generator, randn, sampling_batch

INF = float("inf")


@pytest.fixture
def place(sampling_place: Place) -> Place:
    """Every implementation, the native library included."""
    return sampling_place


def processed(logits: torch.Tensor, p: kernels.SamplingBatch, row: int) -> list[float]:
    """Logits of one row after penalties, bans and mask, in float64."""
    x = logits[row].double().tolist()
    x = [-INF if value != value else value for value in x]
    factor, presence = float(p.repetition_penalty[row]), float(p.presence_penalty[row])
    if p.seen is not None:
        seen = p.seen[int(p.slot[row])].tolist()
        for i, bits in enumerate(seen):
            if bits & (2 if p.suppress_repetition[row] else 3):
                x[i] = x[i] * factor if x[i] < 0 else x[i] / factor
            if bits & 2:
                x[i] -= presence
    for ban_row, i in zip(p.ban_rows.tolist(), p.ban_ids.tolist(), strict=True):
        if ban_row == row:
            x[i] = -1e9
    if p.allow_mask is not None:
        for i in range(len(x)):
            if not (int(p.allow_mask[row, i // 32]) >> (i % 32)) & 1:
                x[i] = -INF
    return x


def kept_ids(x: list[float], p: kernels.SamplingBatch, row: int) -> list[int]:
    """Ids that survive top-k and top-p, best first."""
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    order = order[: int(p.top_k[row]) or len(x)]
    top_p, temperature = float(p.top_p[row]), float(p.temperature[row])
    if not 0 < top_p < 1:
        return order
    probs = torch.softmax(torch.tensor([x[i] for i in order], dtype=torch.float64) / temperature, 0)
    total = 0.0
    for count, prob in enumerate(probs.tolist()):
        total += prob
        if total > top_p:
            return order[: count + 1]
    return order


def expected_ids(logits: torch.Tensor, p: kernels.SamplingBatch) -> list[int]:
    """What ``sample`` must return."""
    chosen = []
    for row in range(len(logits)):
        x = processed(logits, p, row)
        temperature = float(p.temperature[row])
        if max(x) == -INF:
            chosen.append(-1)
        elif temperature <= 0:
            chosen.append(x.index(max(x)))
        else:
            ids = torch.tensor(sorted(kept_ids(x, p, row)))
            noise = gumbel(ids, p.seed[row].cpu(), p.position[row].cpu())
            scores = torch.tensor([x[i] for i in ids.tolist()], dtype=torch.float64) / temperature + noise
            chosen.append(int(ids[scores.argmax()]))
    return chosen


def check(place: Place, logits: torch.Tensor, **fields: object) -> list[int]:
    batch = sampling_batch(len(logits), **fields)
    expected = expected_ids(logits, batch)
    batch = sampling_batch(len(logits), device=place.device, **fields)
    ids = kernels.sample(logits.clone().to(place.device), batch)
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected
    return expected


VOCAB = 333
ROWS = 8


def logits_with_ties(rows: int = ROWS, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """Half of the rows hold few distinct values, so that every cut falls among ties."""
    logits = randn(rows, vocab, seed=seed) * 3
    logits[::2] = (logits[::2] / 2).round()
    logits[0, 7] = -0.0
    return logits


def test_greedy_takes_the_first_maximum(place: Place) -> None:
    logits = logits_with_ties()
    logits[3, 50] = logits[3, 300] = 99.0
    assert check(place, logits, temperature=0.0)[3] == 50


def test_plain_draws(place: Place) -> None:
    check(place, logits_with_ties(), temperature=[0.5, 1, 2, 0.01, 1e-30, 1, 50, 0], seed=list(range(-4, 4)))


def test_top_k(place: Place) -> None:
    counts = [1, 2, 3, 10, 50, 332, 333, 1000]
    check(place, logits_with_ties(seed=1), top_k=counts, temperature=3.0, seed=list(range(8)))


@pytest.mark.parametrize("temperature", (0.7, 3.0))
def test_top_p(place: Place, temperature: float) -> None:
    limits = [0.0, 1e-6, 0.1, 0.5, 0.9, 0.99, 1.0, 2.0]
    check(place, logits_with_ties(seed=2), top_p=limits, temperature=temperature, seed=list(range(8)))


def test_top_k_then_top_p(place: Place) -> None:
    fields = {"top_k": [5, 5, 40, 40, 1, 2, 300, 17], "top_p": [0.3, 0.95, 0.5, 0.8, 0.9, 0.5, 0.6, 0.99]}
    for seed in range(1 if place.name == "interpreter" else 5):
        check(place, logits_with_ties(seed=seed), **fields, temperature=1.5, seed=[seed] * 8)


def test_all_equal_logits(place: Place) -> None:
    """Every cut falls among ties: the smallest ids stay."""
    logits = torch.zeros(4, 100)
    chosen = check(place, logits, top_k=[0, 3, 0, 10], top_p=[0.0, 0.0, 0.055, 0.25], seed=[1, 2, 3, 4])
    assert chosen[1] < 3 and chosen[2] < 6 and chosen[3] < 3


def test_penalties_and_bans(place: Place) -> None:
    seen = torch.randint(0, 4, (12, VOCAB), generator=generator(4)).to(torch.uint8)
    fields = {
        "seen": seen,
        "slot": [3, 1, 4, 11, 5, 9, 2, 6],
        "repetition_penalty": [1.0, 1.3, 0.5, 2.0, 1.1, 1.0, 1.7, 1.2],
        "presence_penalty": [0.0, 0.5, -2.0, 2.0, 0.0, 1.0, 0.3, 0.1],
        "suppress_repetition": [False, True, False, True, False, False, True, False],
        "ban_rows": [0, 0, 7, 3],
        "ban_ids": [5, 6, 332, 0],
    }
    check(place, logits_with_ties(seed=5), temperature=0.0, **fields)
    check(place, logits_with_ties(seed=6), temperature=1.0, top_k=20, seed=list(range(8)), **fields)


def test_mask_comes_after_bans(place: Place) -> None:
    """A banned id that is the only one allowed is still drawn; one that the mask forbids never is."""
    words = (VOCAB + 31) // 32
    mask = torch.zeros(4, words, dtype=torch.int32)
    mask[0, 1] = 1 << 5
    mask[1, words - 1] = 1 << ((VOCAB - 1) % 32)
    mask[2, 0] = -1
    logits = logits_with_ties(rows=4)
    fields = {"allow_mask": mask, "ban_rows": [0, 1, 2], "ban_ids": [37, 40, 3]}
    for temperature in (0.0, 1.0):
        chosen = check(place, logits, temperature=temperature, seed=[1, 2, 3, 4], **fields)
        assert chosen[0] == 37 and chosen[1] == VOCAB - 1 and chosen[2] < 32 and chosen[3] == -1


def test_broken_logits(place: Place) -> None:
    """NaN is never chosen; a row without candidates gives -1; +inf wins."""
    logits = randn(5, 70, seed=7)
    logits[0, ::2] = float("nan")
    logits[1, :] = float("nan")
    logits[2, :] = -INF
    logits[3, 9] = logits[3, 11] = INF
    logits[4, 1:] = -INF
    for temperature in (0.0, 1.0):
        batch = sampling_batch(5, device=place.device, temperature=temperature, top_k=[9, 0, 3, 0, 5])
        ids = kernels.sample(logits.clone().to(place.device), batch).tolist()
        assert ids[0] % 2 == 1 and ids[1:] == [-1, -1, 9, 0]


def test_odd_vocabulary_of_several_blocks(place: Place) -> None:
    """More ids than a program reads at a time, and not a multiple of anything."""
    logits = randn(2, 4999, seed=8) * 2
    check(place, logits, top_k=[0, 700], top_p=[0.9, 0.0], seed=[5, 6], temperature=1.2)


def test_a_draw_depends_on_its_row_alone(place: Place) -> None:
    """R5: the same logits, seed and position give the same id at any place in any batch."""
    logits = logits_with_ties(rows=4, seed=9)
    fields = {"seed": [1, 2, 3, 4], "position": [101, 102, 103, 104], "top_p": [0.8] * 4}
    together = check(place, logits, **fields)
    for row in (0, 3):
        alone = {name: values[row : row + 1] for name, values in fields.items()}
        assert check(place, logits[row : row + 1], **alone) == together[row : row + 1]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's statistic divided by its degrees of freedom, over cells that expect 5 or more."""
    expected = probs * counts.sum()
    big = expected >= 5
    pooled_counts = torch.cat((counts[big], counts[~big].sum().reshape(1)))
    pooled = torch.cat((expected[big], expected[~big].sum().reshape(1)))
    statistic = ((pooled_counts - pooled) ** 2 / pooled.clamp_min(1e-9)).sum()
    return float(statistic) / (len(pooled) - 1)


@pytest.mark.parametrize("what", ("seed", "position"))
def test_draws_follow_the_softmax(place: Place, what: str) -> None:
    """Many seeds, or many positions of one seed, sample softmax(x / T); the test is deterministic."""
    if place.name == "interpreter":
        pytest.skip("one interpreted program per draw is slow; its noise is compared in test_philox")
    rows = 20_000
    logits = randn(24, seed=10) * 1.5
    batch = sampling_batch(rows, device=place.device, temperature=0.8, **{what: list(range(rows))})
    ids = kernels.sample(logits.repeat(rows, 1).to(place.device), batch)
    counts = torch.bincount(ids.cpu(), minlength=24).double()
    probs = torch.softmax(logits.double() / 0.8, 0)
    assert chi_square(counts, probs) < 2.0


def test_top_p_draws_follow_the_renormalised_distribution(place: Place) -> None:
    if place.name == "interpreter":
        pytest.skip("one interpreted program per draw is slow; its noise is compared in test_philox")
    rows = 20_000
    logits = randn(24, seed=11)
    batch = sampling_batch(rows, top_p=0.7, top_k=12, seed=list(range(rows)))
    allowed = kept_ids(logits.double().tolist(), batch, 0)
    batch = sampling_batch(rows, device=place.device, top_p=0.7, top_k=12, seed=list(range(rows)))
    ids = kernels.sample(logits.repeat(rows, 1).to(place.device), batch).cpu()
    assert set(ids.tolist()) <= set(allowed)
    probs = torch.zeros(24, dtype=torch.float64)
    probs[allowed] = torch.softmax(logits.double()[allowed], 0)
    assert chi_square(torch.bincount(ids, minlength=24).double(), probs) < 2.0


def test_mark_seen(place: Place) -> None:
    seen = torch.zeros(5, 300, dtype=torch.uint8, device=place.device)
    ids = torch.tensor([0, 299, 7, 7, -1], device=place.device)
    kernels.mark_seen(seen, 2, ids, 1)
    slots = torch.tensor([2, 4, 0], dtype=torch.int32, device=place.device)
    kernels.mark_seen(seen, slots, torch.tensor([7, 299, -1], device=place.device), 2)
    expected = torch.zeros(5, 300, dtype=torch.uint8)
    expected[2, [0, 299]] = 1
    expected[2, 7] = 3
    expected[4, 299] = 2
    assert torch.equal(seen.cpu(), expected)
    kernels.mark_seen(seen, 1, torch.zeros(0, dtype=torch.int64, device=place.device), 1)
    assert torch.equal(seen.cpu(), expected)


def test_empty_batch(place: Place) -> None:
    logits = torch.zeros(0, 50, dtype=F32, device=place.device)
    empty = {name: [] for name in ("temperature", "top_k", "top_p", "seed", "position", "repetition_penalty")}
    more = {name: [] for name in ("presence_penalty", "suppress_repetition", "slot")}
    assert kernels.sample(logits, sampling_batch(0, device=place.device, **empty, **more)).shape == (0,)
