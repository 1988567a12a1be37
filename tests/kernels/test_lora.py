"""Low-rank adapters of many requests: against float64, base rows untouched, rows alone as in any company."""

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from allspark_kernels.lora import TILE_ROWS
from kernel_helpers import BF16, DTYPES, F16, F32, NAN, Place, assert_close, randn

BASE = kernels.NO_ADAPTER
# Layers: K and the widths of the parts; widths that are no multiple of a vector, K over one split.
LAYERS = ((48, (40, 24, 24)), (1100, (70,)), (64, (130, 33)))
# Slots: ranks of the parts, per layer (None: the adapter leaves that layer alone).
SLOTS = (
    ((8, 8, 8), (8,), (8, 8)),
    ((0, 0, 17), None, (1, 3)),
    (None, (64,), (0, 5)),
    ((64, 64, 64), (3,), (64, 64)),
)


def make_weights(
    k: int, widths: tuple[int, ...], ranks: tuple[int, ...], seed: int, place: Place, dtype: torch.dtype
) -> kernels.LoraWeights:
    down = (randn(sum(ranks), k, seed=seed) / k**0.5).to(dtype).to(place.device)
    ups = tuple(
        randn(rank, width, seed=seed + 1 + part, dtype=dtype, device=place.device)
        for part, (rank, width) in enumerate(zip(ranks, widths, strict=True))
    )
    return kernels.LoraWeights(down, ups)


def make_table(place: Place, dtype: torch.dtype) -> kernels.LoraTable:
    table = kernels.LoraTable(LAYERS, len(SLOTS) + 1, dtype, torch.device(place.device))
    for slot, per_layer in enumerate(SLOTS):
        weights = [
            None if ranks is None else make_weights(k, widths, ranks, 100 * slot + 10 * layer, place, dtype)
            for layer, ((k, widths), ranks) in enumerate(zip(LAYERS, per_layer, strict=True))
        ]
        table.put(slot, weights)
    return table


def expected(x: torch.Tensor, site: kernels.LoraSite, slots: np.ndarray, out: torch.Tensor) -> torch.Tensor:
    """Row by row in float64, from the definition y = y + B (A x)."""
    rows = []
    for row, slot in enumerate(slots):
        own = None if slot == BASE else site.weights[slot]
        total = out[row].double().cpu()
        if own is not None:
            parts, first = [], 0
            for up in own.ups:
                low = own.down[first : first + up.shape[0]].double().cpu() @ x[row].double().cpu()
                parts.append(up.double().cpu().T @ low)
                first += up.shape[0]
            total = total + torch.cat(parts)
        rows.append(total)
    return torch.stack(rows)


def activation_dtype(place: Place, dtype: torch.dtype) -> torch.dtype:
    return F32 if place.name in ("torch", "native") else dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_matches_float64(sampling_place: Place, poisoned: None, dtype: torch.dtype, layer: int) -> None:
    place = sampling_place
    site = make_table(place, dtype).sites[layer]
    # Requests of several lengths, in any order; one adapter fills more than a tile.
    slots, counts = [2, BASE, 0, 3, 1, BASE, 0, 4], [1, 3, 2 * TILE_ROWS + 5, 1, 7, 2, 6, 1]
    plan = kernels.plan_lora(slots, counts, torch.device(place.device))
    assert plan is not None
    of_row = np.repeat(slots, counts)
    kind = activation_dtype(place, dtype)
    x = randn(len(of_row), site.in_features, seed=5, dtype=kind, device=place.device)
    before = randn(len(of_row), site.out_features, seed=6, dtype=kind, device=place.device)
    out = before.clone()
    kernels.lora_add(x, site, plan, out)
    assert_close(out, expected(x, site, of_row, before), kind, size=64.0)
    untouched = torch.tensor([slot in (BASE, 4) or site.weights[slot] is None for slot in of_row])
    assert torch.equal(out[untouched], before[untouched])
    changed = (out != before).any(1).cpu()
    assert bool((changed | untouched).all()), "a row with an adapter did not change"


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
def test_rows_do_not_depend_on_the_batch(sampling_place: Place, dtype: torch.dtype) -> None:
    place = sampling_place
    if place.name == "torch":
        pytest.skip("the oracle leaves the order of sums to its library")
    table = make_table(place, dtype)
    rng = np.random.default_rng(3)
    slots = rng.integers(-1, len(SLOTS), 45)
    for site in table.sites:
        kind = activation_dtype(place, dtype)
        x = randn(len(slots), site.in_features, seed=7, dtype=kind, device=place.device)
        before = randn(len(slots), site.out_features, seed=8, dtype=kind, device=place.device)
        whole = before.clone()
        plan = kernels.plan_lora(slots, np.ones_like(slots), torch.device(place.device))
        assert plan is not None
        kernels.lora_add(x, site, plan, whole)
        for chosen in ([44], [3, 9], list(range(7, 30)), list(range(44, -1, -1))):
            part = before[chosen].clone()
            plan = kernels.plan_lora(slots[chosen], np.ones(len(chosen), int), torch.device(place.device))
            if plan is not None:
                kernels.lora_add(x[chosen].contiguous(), site, plan, part)
            assert torch.equal(part, whole[chosen]), f"rows {chosen} differ"


def test_rows_do_not_depend_on_the_ranks_of_other_slots(sampling_place: Place) -> None:
    """A larger neighbour widens the scratch memory; a slot that is filled anew serves its new adapter."""
    place = sampling_place
    table = kernels.LoraTable(LAYERS[:1], 2, F32, torch.device(place.device))
    small = make_weights(*LAYERS[0], (4, 4, 4), 1, place, F32)
    large = make_weights(*LAYERS[0], (64, 64, 64), 2, place, F32)
    x, before = randn(2, 48, seed=3, device=place.device), randn(2, 88, seed=4, device=place.device)

    def run(slots: list[int]) -> torch.Tensor:
        plan = kernels.plan_lora(slots, [1, 1], torch.device(place.device))
        out = before.clone()
        if plan is not None:
            kernels.lora_add(x, table.sites[0], plan, out)
        return out

    table.put(0, [small])
    alone = run([0, BASE])
    table.put(1, [large])
    both = run([0, 1])
    assert torch.equal(both[0], alone[0])
    table.clear(0)
    assert torch.equal(run([0, 1])[0], before[0])
    table.put(0, [large])
    table.clear(1)
    x[0], before[0] = x[1], before[1]
    assert torch.equal(run([0, BASE])[0], both[1])


def test_no_adapter_means_no_plan() -> None:
    device = torch.device("cpu")
    assert kernels.plan_lora([BASE, BASE], [3, 1], device) is None
    plan = kernels.plan_lora([5, BASE, 5], [1, 2, TILE_ROWS], device)
    assert plan is not None
    assert plan.groups == ((5, 0, TILE_ROWS + 1),)
    assert plan.rows.tolist() == [0, *range(3, 3 + TILE_ROWS)]
    assert plan.tiles.tolist() == [[5, 0, TILE_ROWS], [5, TILE_ROWS, 1]]


def test_what_does_not_fit_is_refused() -> None:
    here = Place("torch", "cpu")
    device = torch.device("cpu")
    table = kernels.LoraTable(LAYERS[:1], 1, F32, device)
    good = make_weights(48, (40, 24, 24), (2, 2, 2), 0, here, F32)
    bad = (
        make_weights(47, (40, 24, 24), (2, 2, 2), 0, here, F32),
        make_weights(48, (40, 24, 25), (2, 2, 2), 0, here, F32),
        make_weights(48, (40, 24, 24), (2, 2, 2), 0, here, BF16),
        kernels.LoraWeights(good.down.T.contiguous().T, good.ups),
        kernels.LoraWeights(torch.zeros(6 * 48 + 1)[1:].view(6, 48), good.ups),
        kernels.LoraWeights(good.down[:5], good.ups),
    )
    for weights in bad:
        with pytest.raises(ValueError, match="adapter's matri"):
            table.put(0, [weights])
    assert table.sites[0].weights == [None]
    table.put(0, [good])
    plan = kernels.plan_lora([0], [2], device)
    assert plan is not None
    x, out = torch.zeros(2, 48), torch.full((2, 88), NAN)
    for wrong in ((x[:1], out), (x[:, :40], out), (x, out[:, :80]), (x, out.half()), (x, out[:1])):
        with pytest.raises(ValueError, match="must be contiguous"):
            kernels.lora_add(wrong[0], table.sites[0], plan, wrong[1])
    for shapes, slots in (((), 0), (((4, ()),), 1), (((4, (1, 1, 1, 1)),), 1)):
        with pytest.raises(ValueError, match=r"slot|parts"):
            kernels.LoraTable(shapes, slots, F32, device)
