"""GGUF files: layout, quantisations, metadata, damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import EngineError, ModelIOError, UnsupportedModelError
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.gguf_file import GGUFFile
from allspark_workers.models.gguf_header import read_gguf
from allspark_workers.models.loader import load_model
from engine_helpers import LLAMA3_ROPE, VARIANTS, YARN_ROPE, build_reference, random_prompt, request, run_all
from gguf import GGMLQuantizationType as Kind
from gguf_helpers import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Maker = Callable[..., Engine]
# Rows of a quantised matrix are whole blocks of 32.
WIDE = {"intermediate_size": 96}
CASES = [
    ("llama-tied", "llama", Kind.F32),
    ("llama-biases", "llama", Kind.F16),
    ("mistral", "llama", Kind.BF16),
    ("llama-tied", "llama", Kind.Q4_0),
    ("llama-tied", "llama", Kind.Q4_1),
    ("qwen2", "qwen2", Kind.Q8_0),
    ("qwen2", "qwen2", Kind.Q5_1),
    ("qwen3", "qwen3", Kind.Q5_0),
    ("qwen3", "qwen3", Kind.F32),
]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Reference models whose matrices can be quantised."""

    def build(variant: str, **changes: Any) -> Any:
        family, fields = VARIANTS[variant]
        monkeypatch.setitem(VARIANTS, variant, (family, fields | WIDE | changes))
        return build_reference(variant)

    return build


@torch.inference_mode()
def assert_same_tokens(engine: Engine, model: Any) -> None:
    """Greedy: each token is the reference's first maximum, given the tokens before it."""
    for length in (3, 70):
        prompt = random_prompt(length)
        tokens = run_all(engine, [request(f"p{length}", prompt, 20)]).tokens[f"p{length}"]
        logits = model(torch.tensor([prompt + tokens])).logits[0, length - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("variant", "arch", "kind"), CASES)
def test_tokens_equal_the_reference_with_the_stored_weights(
    variant: str, arch: str, kind: Kind, wide: Any, tmp_path: Path, make_engine: Maker
) -> None:
    model = wide(variant)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, arch, kind)
    engine = make_engine(path)
    assert engine.facts.eos_token_ids == (2,) and engine.facts.model_type == arch
    assert_same_tokens(engine, model)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, "fp32"), (Kind.F16, "fp16"), (Kind.BF16, "bf16"), (Kind.Q8_0, "bf16")]
)
def test_auto_keeps_plain_formats_and_unpacks_quantised_ones(
    kind: Kind, dtype: str, wide: Any, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", wide("llama-tied"), "llama", kind)
    assert load_model(ModelConfig(str(tmp_path / "m.gguf"))).dtype_name == dtype


def test_yarn_metadata(wide: Any, tmp_path: Path, make_engine: Maker) -> None:
    model = wide("llama-tied", rope_parameters=YARN_ROPE)
    extra = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 160,
    }
    write_gguf(tmp_path / "m.gguf", model, "llama", Kind.F32, extra)
    assert_same_tokens(make_engine(tmp_path / "m.gguf"), model)


def test_rope_divisors_stand_for_the_llama3_rule(wide: Any, tmp_path: Path, make_engine: Maker) -> None:
    model = wide("llama-tied", rope_parameters=LLAMA3_ROPE)
    plain = 1.0 / (10000.0 ** (np.arange(0, 16, 2) / 16))
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == 8.0
    write_gguf(tmp_path / "m.gguf", model, "llama", Kind.F32, {"rope_freqs.weight": divisors})
    assert_same_tokens(make_engine(tmp_path / "m.gguf"), model)


def test_every_type_the_package_dequantises_is_read_like_it_does(tmp_path: Path) -> None:
    """Random bytes in every format: same bytes and same values as the package's own reader gives."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    kinds = list(gguf.quants._type_traits)
    for kind in kinds:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 60, (6, 2 * size), dtype=np.uint8)  # no half-float infinities
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = read_gguf(tmp_path / "types.gguf").tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "types.gguf").tensors}
    assert len(kinds) > 15 and set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.data.tobytes() == theirs[name].data.tobytes(), name
        assert tensor.shape == tuple(reversed(theirs[name].shape.tolist())), name
        values = gguf.quants.dequantize(tensor.data, tensor.kind)
        assert values.shape == tensor.shape, name


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, build_reference("llama-tied"), "llama", Kind.F32)
    return path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.999))
def test_a_truncated_file_is_named(share: float, small_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    content = small_file.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelIOError, match=r"cut\.gguf"):
        GGUFFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_never_escapes_the_error_tree(
    data: st.DataObject, small_file: Path, tmp_path: Path
) -> None:
    """Random bytes in the header: an error of ours, or a file that still loads; nothing else."""
    head = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(head)
    try:
        load_model(ModelConfig(str(path), max_length=64))
    except EngineError as error:
        assert "damaged.gguf" in str(error)


def test_what_is_not_supported_is_said(wide: Any, tmp_path: Path) -> None:
    model, path = wide("llama-tied"), tmp_path / "m.gguf"
    for arch, extra, reason in (
        ("falcon", {}, "'falcon' is not supported; known: llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope' is not supported"),
    ):
        write_gguf(path, model, arch, Kind.F32, extra)
        with pytest.raises(UnsupportedModelError, match=reason):
            GGUFFile(path)


def test_big_endian_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content, reason in (
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32), "byte order"),
        (b"PK\x03\x04" + bytes(64), "does not begin with GGUF"),
        (b"", "only 0 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelIOError, match=reason):
            GGUFFile(path)
    with pytest.raises(ModelIOError, match="cannot read"):
        GGUFFile(tmp_path / "none.gguf")
