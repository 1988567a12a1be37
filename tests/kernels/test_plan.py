"""Attention plans: what they refuse, and that their work lists cover every token and key exactly once."""

import allspark_kernels as kernels
import numpy as np
import pytest
import torch
from allspark_kernels.triton_ops.attention_plan import SPLIT_KEYS, DeviceWork, tile_rows

HEADS = (6, 2, 64)
CPU = torch.device("cpu")


def table(kv_lens: list[int], span_size: int = 32) -> np.ndarray:
    width = max(-(-length // span_size) for length in kv_lens)
    return np.arange(len(kv_lens) * width, dtype=np.int32).reshape(len(kv_lens), width)


def interpreted_plan(
    q_lens: list[int], kv_lens: list[int], decode_lens: list[int] | None = None
) -> kernels.AttentionPlan:
    if torch.cuda.is_available():
        pytest.skip("reads the work lists on the host, with the interpreter's backend")
    with kernels.use_backend("triton"):
        return kernels.plan_attention(q_lens, kv_lens, table(kv_lens), 32, CPU, *HEADS, decode_lens)


@pytest.mark.parametrize(
    ("changes", "reason"),
    (
        ({"q_lens": [0, 1]}, "at least one query token"),
        ({"q_lens": [6, 1]}, "kv_len >= q_len"),
        ({"kv_lens": [5]}, "entries"),
        ({"q_lens": []}, "span_table must be int32"),
        ({"q_lens": [1.5, 1.0]}, "vector of integers"),
        ({"kv_lens": [5, 65]}, "the longest request needs 3"),
        ({"span_table": np.array([[0, 1], [-1, 2]], np.int32)}, "negative span id"),
        ({"span_table": np.zeros((2, 2), np.int64)}, "span_table must be int32"),
        ({"span_size": 48}, "span_size 48"),
        ({"num_q_heads": 5}, "cannot share"),
        ({"head_dim": 63}, "must be even"),
        ({"decode_lens": [2, 0]}, "decode_lens must lie"),
        ({"decode_lens": [0]}, "entries"),
    ),
)
def test_refuses(changes: dict[str, object], reason: str) -> None:
    arguments: dict[str, object] = {
        "q_lens": [1, 1],
        "kv_lens": [5, 40],
        "span_table": table([40, 40]),
        "span_size": 32,
        "device": CPU,
        "num_q_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    with pytest.raises(ValueError, match=reason):
        kernels.plan_attention(**{**arguments, **changes})  # type: ignore[arg-type]


def test_unused_table_entries_are_not_read() -> None:
    spans = table([5, 40])
    spans[0, 1] = -7
    plan = kernels.plan_attention([1, 1], [5, 40], spans, 32, CPU, *HEADS)
    assert plan.max_span == 3


def owner_of(work: DeviceWork, begin: int, kv_lens: list[int]) -> int:
    """The request whose span ids begin at index ``begin`` of those of the step."""
    first = int(work.lists[1])
    owner = int(work.lists[first + begin]) // table(kv_lens).shape[1]
    count = -(-kv_lens[owner] // 32)
    assert work.lists[first + begin :][:count].tolist() == table(kv_lens)[owner, :count].tolist()
    return owner


def test_work_lists_cover_every_token_once() -> None:
    q_lens, kv_lens = [1, 70, 1, 40, 5], [1, 70, 600, 640, 300]
    plan = interpreted_plan(q_lens, kv_lens, decode_lens=[0, 0, 1, 4, 5])
    work: DeviceWork = plan.state
    assert work.prefill is not None and work.decode is not None
    position = np.concatenate([np.arange(n - q, n) for q, n in zip(q_lens, kv_lens, strict=True)])
    request = np.repeat(np.arange(5), q_lens)
    seen = np.zeros(sum(q_lens), np.int64)
    for first, count, begin, start in work.prefill.tiles.tolist():
        owner = owner_of(work, begin, kv_lens)
        assert 0 < count * (HEADS[0] // HEADS[1]) <= tile_rows(HEADS[0] // HEADS[1])
        tokens = np.arange(first, first + count)
        seen[tokens] += 1
        assert (request[tokens] == owner).all()
        assert position[tokens].tolist() == list(range(start, start + count))
    expected_items = []
    for row, (token, begin, num_keys, first_item) in enumerate(work.decode.rows.tolist()):
        owner = owner_of(work, begin, kv_lens)
        seen[token] += 1
        assert request[token] == owner and num_keys == position[token] + 1
        assert first_item == len(expected_items)
        expected_items += [[row, split] for split in range(-(-num_keys // SPLIT_KEYS))]
    assert (seen == 1).all()
    assert work.decode.items.tolist() == expected_items
    assert work.lists[0] == len(expected_items)
    assert len(work.lists) == work.lists[1] + sum(-(-length // 32) for length in kv_lens)


def test_generated_tokens_decode_and_prompt_tokens_prefill() -> None:
    by_default = interpreted_plan([1, 2], [9, 9]).state
    assert by_default.decode.rows[:, 0].tolist() == [0]
    last_prompt_token = interpreted_plan([1], [33], decode_lens=[0]).state
    assert last_prompt_token.decode is None and last_prompt_token.prefill.num_tiles == 1
    recomputed = interpreted_plan([5], [20], decode_lens=[3]).state
    assert recomputed.decode.rows[:, 2].tolist() == [18, 19, 20]
    assert recomputed.prefill.tiles[:, 1].tolist() == [2]


def test_reserved_plan_refuses_what_does_not_fit() -> None:
    plan = kernels.reserve_decode_plan(2, 100, 32, CPU, *HEADS)
    with pytest.raises(ValueError, match="reserve a larger plan"):
        plan.refill([1, 1, 1], table([1, 1, 1]))
    with pytest.raises(ValueError, match="reserve a larger plan"):
        plan.refill([101], table([101]))
    with pytest.raises(ValueError, match="only a plan from reserve_decode_plan"):
        kernels.plan_attention([1], [1], table([1]), 32, CPU, *HEADS).refill([1], table([1]))
    with pytest.raises(ValueError, match="capacity >= 1"):
        kernels.reserve_decode_plan(0, 100, 32, CPU, *HEADS)


def test_a_refill_moves_what_the_step_uses_and_not_what_it_could_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """With long contexts the lists of the largest step are megabytes: they do not go up in every step."""
    if torch.cuda.is_available():
        pytest.skip("counts what the interpreter's backend copies")
    moved: list[int] = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        moved.append(source.numel())
        return copy(self, source, non_blocking)

    with kernels.use_backend("triton"):
        plan = kernels.reserve_decode_plan(64, 131072, 32, CPU, *HEADS)
        monkeypatch.setattr(torch.Tensor, "copy_", counted)
        plan.refill([100, 600, 1], table([100, 600, 1]))
    rows, items, spans = 64 * 4, (1 + 3 + 1) * 2, 4 + 19 + 1
    assert len(moved) == 1 and rows + items + spans <= moved[0] <= rows + items + spans + 12
    assert plan.state.lists.numel() > 300_000


def test_reserved_plans_share_a_workspace_that_is_large_enough() -> None:
    if torch.cuda.is_available():
        pytest.skip("reads the work lists on the host, with the interpreter's backend")
    with kernels.use_backend("triton"):
        large = kernels.reserve_decode_plan(8, 1000, 32, CPU, *HEADS)
        small = kernels.reserve_decode_plan(2, 1000, 32, CPU, *HEADS, shared=large)
        assert small.state.decode.workspace is large.state.decode.workspace
        for arguments in ((9, 1000, 32, CPU, *HEADS), (2, 1000, 32, CPU, 6, 2, 128)):
            with pytest.raises(ValueError, match="shared workspace"):
                kernels.reserve_decode_plan(*arguments, shared=large)


def test_refill_forgets_the_step_before() -> None:
    plan = kernels.reserve_decode_plan(3, 100, 32, CPU, *HEADS)
    plan.refill([100, 50, 3], table([100, 50, 3]))
    plan.refill([7], table([7]))
    assert plan.kv_lens.tolist() == [7, 0, 0]
    assert plan.max_span == 0
