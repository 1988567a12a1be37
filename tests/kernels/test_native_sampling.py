"""Native sampling chooses what the oracle chooses, and leaves the same processed logits behind."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from allspark_kernels import SamplingBatch, native, torch_ops

if not native.available():
    pytest.skip(str(native.unavailable_reason), allow_module_level=True)

from allspark_kernels.native import library

ROWS = 16


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = native.get_num_threads()
    yield
    native.set_num_threads(before)


def batch(rows: int, seed: int, **fields: object) -> SamplingBatch:
    g = torch.Generator().manual_seed(seed)
    none = torch.zeros(0, dtype=torch.int64)
    plain = SamplingBatch(
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int32),
        top_p=torch.ones(rows),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        position=torch.randint(0, 2**40, (rows,), generator=g),
        repetition_penalty=torch.ones(rows),
        presence_penalty=torch.zeros(rows),
        suppress_repetition=torch.zeros(rows, dtype=torch.bool),
        seen=None,
        slot=torch.zeros(rows, dtype=torch.int32),
        ban_rows=none,
        ban_ids=none,
    )
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def compare(logits: torch.Tensor, p: SamplingBatch) -> torch.Tensor:
    """Sample with both, from copies; they must agree on choices and processed logits."""
    expected_logits, actual_logits = logits.clone(), logits.clone()
    expected = torch_ops.sample(expected_logits, p)
    actual = native.sample(actual_logits, p)
    assert actual.tolist() == expected.tolist()
    assert torch.equal(actual_logits, expected_logits)
    return actual


@pytest.mark.parametrize("vocab", (1, 7, 333, 5000, 49152))
@pytest.mark.parametrize("top_k", (0, 1, 50, 3000))
@pytest.mark.parametrize("top_p", (1.0, 0.1, 0.95))
def test_choices(vocab: int, top_k: int, top_p: float) -> None:
    p = batch(
        ROWS,
        vocab + top_k,
        top_k=torch.full((ROWS,), top_k, dtype=torch.int32),
        top_p=torch.full((ROWS,), top_p),
        temperature=torch.rand(ROWS, generator=torch.Generator().manual_seed(vocab)) * 2,
    )
    compare(random_logits(ROWS, vocab, top_k), p)


@pytest.mark.parametrize("spread", (0.0, 0.01, 1.0, 100.0))
@pytest.mark.parametrize("temperature", (1e-30, 1e-3, 1.0, 100.0))
def test_flat_and_peaked_logits(spread: float, temperature: float) -> None:
    p = batch(ROWS, 5, temperature=torch.full((ROWS,), temperature))
    compare(random_logits(ROWS, 4000, 1, spread), p)


def test_rows_may_differ_in_every_field() -> None:
    g = torch.Generator().manual_seed(1)
    rows, vocab = 64, 2000
    p = batch(
        rows,
        2,
        temperature=torch.randint(0, 3, (rows,), generator=g) * 0.7,
        top_k=torch.randint(-1, 100, (rows,), generator=g).to(torch.int32),
        top_p=torch.rand(rows, generator=g) * 1.3 - 0.1,
        repetition_penalty=torch.rand(rows, generator=g) + 0.5,
        presence_penalty=torch.randn(rows, generator=g),
        suppress_repetition=torch.rand(rows, generator=g) < 0.5,
        seen=torch.randint(0, 4, (9, vocab), generator=g).to(torch.uint8)
        * (torch.rand(9, vocab, generator=g) < 0.1),
        slot=torch.randint(0, 9, (rows,), generator=g).to(torch.int32),
        ban_rows=torch.randint(0, rows, (3000,), generator=g),
        ban_ids=torch.randint(0, vocab, (3000,), generator=g),
        allow_mask=torch.randint(-(2**31), 2**31 - 1, (rows, 63), generator=g).to(torch.int32),
    )
    for seed in range(10):
        compare(random_logits(rows, vocab, seed), p)


def test_ties_prefer_the_smaller_id() -> None:
    logits = torch.zeros(ROWS, 3000)
    assert compare(logits, batch(ROWS, 1, temperature=torch.zeros(ROWS))).tolist() == [0] * ROWS
    top_k = torch.full((ROWS,), 3, dtype=torch.int32)
    assert set(compare(logits, batch(ROWS, 1, top_k=top_k)).tolist()) <= {0, 1, 2}
    logits[:, ::2] = -0.0
    assert set(compare(logits, batch(ROWS, 1, top_k=top_k)).tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("top_k", (0, 4))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_nan_and_infinity(temperature: float, top_k: int) -> None:
    logits = random_logits(5, 50, 3)
    logits[0, 10:] = float("nan")
    logits[1, :] = float("-inf")
    logits[2, :] = float("nan")
    logits[3, :] = float("-inf")
    logits[3, 49] = 1.0
    logits[4, 7] = float("inf")
    p = batch(
        5,
        4,
        temperature=torch.full((5,), temperature),
        top_k=torch.full((5,), top_k, dtype=torch.int32),
    )
    chosen = compare(logits, p).tolist()
    assert chosen[1:] == [-1, -1, 49, 7] and 0 <= chosen[0] < 10


def test_a_row_does_not_depend_on_its_neighbours_threads_or_instruction_set() -> None:
    logits, p = random_logits(ROWS, 30000, 8), batch(ROWS, 8, top_p=torch.full((ROWS,), 0.95))
    expected = native.sample(logits.clone(), p).tolist()
    for isa in library.runnable_isas():
        with library.use_isa(isa):
            for count in (1, 3):
                native.set_num_threads(count)
                assert native.sample(logits.clone(), p).tolist() == expected
    for row in range(0, ROWS, 5):
        fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
        alone = {
            name: x[row : row + 1] if isinstance(x, torch.Tensor) and len(x) == ROWS else x
            for name, x in fields.items()
        }
        assert native.sample(logits[row : row + 1].clone(), SamplingBatch(**alone)).tolist() == [
            expected[row]
        ]


def test_ids_outside_their_table_are_refused() -> None:
    logits = torch.zeros(2, 10)
    for ids in (-1, 10):
        p = batch(2, 1, ban_rows=torch.tensor([1]), ban_ids=torch.tensor([ids]))
        with pytest.raises(ValueError, match="banned id"):
            native.sample(logits, p)
    seen = torch.zeros(3, 10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="slot"):
        native.sample(logits, batch(2, 1, seen=seen, slot=torch.tensor([0, 3], dtype=torch.int32)))


def test_mark_seen() -> None:
    actual, expected = (torch.zeros(4, 30, dtype=torch.uint8) for _ in "ae")
    slots, ids = torch.tensor([0, 3, 3, 1], dtype=torch.int32), torch.tensor([5, 6, -1, 5])
    for ops, seen in ((native, actual), (torch_ops, expected)):
        ops.mark_seen(seen, 2, torch.tensor([1, 1, 29, -1]), 1)
        ops.mark_seen(seen, slots, ids, 2)
        ops.mark_seen(seen, slots, ids, 1)
    assert torch.equal(actual, expected) and int(actual.sum()) == 11
    for slot, token in ((4, 0), (-1, 0), (0, 30)):
        with pytest.raises(ValueError, match="outside"):
            native.mark_seen(actual, slot, torch.tensor([token]), 1)
    assert torch.equal(actual, expected)
