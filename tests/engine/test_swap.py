"""Unload and Reload move weights out of memory and back, bit for bit, the threshold taken literally."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from allspark_workers.engine import promises, swap
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import ModelIOError, ModelMemoryError
from allspark_workers.engine.memory import block_of, blocks_of, resident_bytes, tensors_of
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.loader import load_model
from engine_helpers import TinyModels, request, run_all
from medium_model import EMBEDDING_BYTES, write_medium_model
from medium_model import resident_bytes as rss

CPU = torch.device("cpu")
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_medium_model(tmp_path_factory.mktemp("medium"))


@pytest.fixture(autouse=True)
def swap_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def load(path: Path) -> Engine:
    settings = ModelConfig(str(path), num_threads=1, max_batch=2)
    return Engine(load_model(settings), settings)


def generate(engine: Engine) -> list[int]:
    engine.start()
    tokens = run_all(engine, [request("r", PROMPT, 12, do_sample=True, seed=7)]).tokens["r"]
    engine.stop()
    return tokens


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_memory_falls_and_the_same_tokens_come_back(
    medium: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allspark_kernels.backend._forced", backend)
    monkeypatch.setattr("allspark_kernels.backend._selected", [None, None])
    engine = load(medium)
    before_tokens = generate(engine)
    weights = sum(block.nbytes for block in blocks_of(engine._model.decoder))
    assert weights >= 65e6
    loaded = rss()
    engine.unload(0)
    unloaded = rss()
    assert loaded - unloaded > 0.9 * weights
    assert list(tmp_path.iterdir()) == [], "the file has no name: it goes with the process"
    engine.reload()
    assert rss() - unloaded > 0.9 * weights
    assert generate(engine) == before_tokens
    engine.close()
    assert loaded - rss() > 0.9 * weights


@pytest.mark.parametrize(
    ("threshold", "moves"),
    [(0, "all"), (EMBEDDING_BYTES - 1, "embedding"), (EMBEDDING_BYTES, "none of that size")],
)
def test_only_tensors_larger_than_the_threshold_move(
    medium: Path, tmp_path: Path, threshold: int, moves: str
) -> None:
    engine = load(medium)
    blocks = [b for b in blocks_of(engine._model.decoder) if b.pages().nbytes]
    table = block_of(engine._model.decoder.embedding)
    assert table.nbytes == EMBEDDING_BYTES
    engine.unload(threshold)
    gone = {b for b in blocks if resident_bytes(b) < b.pages().nbytes}
    assert gone == {b for b in blocks if b.nbytes > threshold}
    assert (table in gone) == (moves != "none of that size")
    assert (gone == set(blocks)) == (moves == "all")
    engine.reload()
    engine.close()


def test_a_directory_without_room_leaves_the_model_as_it_is(
    medium: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/missing")
    engine = load(medium)
    before = generate(engine)
    with pytest.raises(ModelIOError, match=r"missing.*TMPDIR"):
        engine.unload(0)
    assert generate(engine) == before
    engine.close()


def test_a_model_that_does_not_fit_back_stays_out(
    medium: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(medium)
    before = generate(engine)
    engine.unload(0)
    monkeypatch.setattr(promises, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(ModelMemoryError, match="do not fit: cpu has 1048576 free"):
        engine.reload()
    monkeypatch.undo()
    engine.reload()
    assert generate(engine) == before
    engine.close()


@pytest.mark.parametrize("piece_bytes", [7, 19_999, 1 << 20])
def test_host_copies_empty_the_storage_and_keep_aliases(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of CUDA, on storages of the CPU: views and shared storages are right again afterwards."""
    monkeypatch.setattr(swap, "_PIECE_BYTES", piece_bytes)
    big, small = torch.arange(5000.0), torch.arange(10.0)
    view, values = big[100:200], big.clone()
    other = torch.arange(77, dtype=torch.int16)
    root = {"tied": [big, big.view(50, 100)], "small": small, "other": other}
    storages = [t.untyped_storage() for t in tensors_of(root) if isinstance(t, torch.Tensor)]
    assert len(storages) == 3
    copy = swap.HostCopy([s for s in storages if s.nbytes() > 40], CPU)
    assert (big.untyped_storage().nbytes(), small.untyped_storage().nbytes()) == (0, 40)
    assert copy.nbytes == sum(len(piece) for piece in copy._pieces) == 20_154
    copy.restore()
    assert torch.equal(big, values)
    assert torch.equal(view, values[100:200])
    assert torch.equal(other, torch.arange(77, dtype=torch.int16))


def test_promised_memory_is_not_free(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in one worker: the second sees what the first will use, before it uses it."""
    path = str(tiny.path("llama-tied"))
    settings = ModelConfig(path, dtype="fp32", num_threads=1, kv_bytes=1 << 20, max_batch=64)
    free = 1 << 30
    monkeypatch.setattr(promises, "free_bytes", lambda _: free)
    before = promises.available_bytes(CPU)
    first = Engine(load_model(settings), settings)
    planned = before - promises.available_bytes(CPU)
    assert 0.9 * (1 << 20) < planned <= 1 << 20
    first.start()
    run_all(first, [request("r", [5] * 300, 100)])
    started = before - promises.available_bytes(CPU)
    assert 0 < started < planned, "what was written to is no promise any more: the system counts it as used"
    free = planned
    with pytest.raises(ModelMemoryError, match="MiB free"):
        load_model(settings)
    first.close()
    assert promises.available_bytes(CPU) == free
    load_model(settings)


def test_a_mapped_file_needs_no_copy(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"\1" * (1 << 20))
    mapped = torch.from_file(str(tmp_path / "weights"), shared=False, size=1 << 20, dtype=torch.uint8)
    own = torch.full((1 << 20,), 2, dtype=torch.uint8)
    assert int(mapped.sum()) == 1 << 20
    file = swap.SwapFile([block_of(mapped), block_of(own)])
    assert file._blocks == [block_of(own)]
    file.restore()
    assert (int(mapped.sum()), int(own.sum())) == (1 << 20, 2 << 20)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("llama-biases", "fp32"), ("llama-tied", "int8"), ("qwen3-moe", "fp32"), ("gemma2", "bf16")],
)
def test_every_weight_of_every_family_is_found(tiny: TinyModels, variant: str, dtype: str) -> None:
    """What the loader counted, to the byte: a layout that was overlooked would stay in memory unnoticed."""
    settings = ModelConfig(str(tiny.path(variant)), dtype=dtype, num_threads=1, max_length=128)
    engine = Engine(load_model(settings), settings)
    before = generate(engine)
    found = sum(block.nbytes for block in blocks_of(engine._model.decoder))
    assert found >= engine._model.weight_bytes
    engine.unload(0)
    engine.reload()
    assert generate(engine) == before
    engine.close()
