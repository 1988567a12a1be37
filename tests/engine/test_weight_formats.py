"""Weights that stay quantised: rounded at load (int8, int4), or as a GGUF file has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from allspark_broker.build import check_config
from allspark_bus.catalogue import ModelRecord, ModelState
from allspark_kernels import QuantFormat, quantise
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.convert import model_config
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import ModelIOError
from allspark_workers.engine.swap import swap_out
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models import gguf_file
from allspark_workers.models.gguf_codes import KEPT_BITS, quantised_weight
from allspark_workers.models.gguf_header import TensorInfo
from allspark_workers.models.loader import load_model
from allspark_workers.settings import WorkerSettings
from engine_helpers import TinyModels, build_reference, random_prompt, request, run_all
from gguf import GGMLQuantizationType as Kind
from gguf_helpers import write_gguf
from test_reference import record_logits, reference_logits

Maker = Callable[..., Engine]
FORMATS = {
    "int8": QuantFormat(8, 0),
    "int4": QuantFormat(4, 128),
    "int4_g64": QuantFormat(4, 64),
    "int4_g32": QuantFormat(4, 32),
}
# Embedding and routers stay as they are; the output matrix has 8 bits whatever the others have.
KEPT = ("embed_tokens", "mlp.gate.", "shared_expert_gate", "norm", "bias")


def round_weights(model: Any, form: QuantFormat) -> None:
    """Replace the matrices of a reference model by what rounding leaves of them."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in KEPT):
            continue
        flat = parameter.data.flatten(0, -2)
        rounded = quantise(flat, QuantFormat(8, 0) if "lm_head" in name else form).dequantise()
        assert not torch.equal(rounded, flat)
        parameter.data.copy_(rounded.view_as(parameter))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("variant", ["llama-biases", "glm4", "qwen2-moe"])
def test_logits_are_those_of_the_rounded_weights(
    variant: str, name: str, tiny: TinyModels, make_engine: Maker, monkeypatch: Any
) -> None:
    if variant != "qwen2-moe" and name in ("int4", "int4_g64"):
        pytest.skip("one family goes through every format")
    model = build_reference(variant)
    round_weights(model, FORMATS[name])
    engine = make_engine(variant, dtype=name)
    assert engine.facts.dtype == name
    logits = record_logits(engine, monkeypatch)
    prompts = {f"p{n}": random_prompt(n) for n in (1, 33, 127)}
    run_all(engine, [request(key, ids, 1) for key, ids in prompts.items()])
    for key, ids in prompts.items():
        difference = (logits[key] - reference_logits(model, ids)).abs().max().item()
        assert difference <= 1e-4, f"{variant} {name} {key}: {difference}"


def test_quantised_tokens_do_not_depend_on_neighbours_or_chunks(make_engine: Maker) -> None:
    prompt = random_prompt(90)
    target = {"new_tokens": 16, "do_sample": True, "seed": 3}
    alone = run_all(make_engine("qwen3", dtype="int4"), [request("t", prompt, **target)]).tokens["t"]
    crowd = [request(f"n{n}", random_prompt(n, seed=n), 9) for n in (1, 40, 77)]
    engine = make_engine("qwen3", dtype="int4", prefill_chunk=13)
    assert run_all(engine, [*crowd, request("t", prompt, **target)]).tokens["t"] == alone


def test_quantised_weights_take_less_memory(tiny: TinyModels) -> None:
    path = str(tiny.path("llama-tied"))
    models = {name: load_model(ModelConfig(path, dtype=name)) for name in ("fp32", *FORMATS)}
    table = models["fp32"].decoder.embedding.nbytes
    rotation = models["fp32"].decoder.cos_sin.nbytes
    matrices = {name: m.weight_bytes - table - rotation for name, m in models.items()}
    assert matrices["int8"] < 0.32 * matrices["fp32"]
    assert matrices["int4_g32"] < 0.25 * matrices["fp32"]
    assert matrices["int4"] < matrices["int4_g32"] < matrices["int8"]
    for name, model in models.items():
        estimate = model.precision.weight_bytes(model.arch)
        assert 0.8 < estimate / (model.weight_bytes - rotation) < 1.25, name


@pytest.mark.parametrize("kind", list(KEPT_BITS), ids=lambda kind: kind.name)
def test_codes_of_a_block_format_are_the_values_that_dequantising_gives(kind: Kind) -> None:
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 256, (5, 4, block_bytes), dtype=np.uint8)
    ends = {Kind.Q6_K: (209,), Kind.Q4_1: (1, 3), Kind.Q4_K: (1, 3)}.get(kind, (1,))
    for at in ends:
        raw[..., at] &= 0xBB  # the exponents of float16 factors: finite, of either sign
    tensor = TensorInfo("x", kind, (5, 4 * size), raw.reshape(5, -1))
    weight = quantised_weight(tensor)
    assert weight is not None
    expected = gguf.quants.dequantize(tensor.data, kind)
    assert np.array_equal(weight.dequantise().numpy(), expected)
    parts = 1 if weight.offsets is None else 2
    assert weight.bits + 8 * parts * weight.scales.nbytes / weight.codes.numel() <= KEPT_BITS[kind]


@pytest.mark.parametrize(
    ("variant", "arch", "kind"),
    [("llama-biases", "llama", Kind.Q8_0), ("llama-tied", "llama", Kind.Q4_0), ("qwen2", "qwen2", Kind.Q4_1)],
)
def test_a_file_kept_quantised_gives_the_bits_of_its_dequantised_values(
    variant: str, arch: str, kind: Kind, tmp_path: Path, make_engine: Maker, monkeypatch: Any
) -> None:
    """Logits equal those of fp32 weights exactly, from a fraction of the memory."""
    write_gguf(tmp_path / "m.gguf", build_reference(variant, intermediate_size=96), arch, kind)
    requests = [request(f"p{n}", random_prompt(n), 12) for n in (1, 40, 130)]
    results = []
    for is_kept in (True, False):
        if not is_kept:
            monkeypatch.setattr(gguf_file, "quantised_weight", lambda tensor: None)
        engine = make_engine(tmp_path / "m.gguf", dtype="fp32")
        logits = record_logits(engine, monkeypatch)
        tokens = run_all(engine, requests).tokens
        results.append((tokens, logits, engine.facts.weight_bytes))
    (tokens, logits, kept_bytes), (wide_tokens, wide_logits, wide_bytes) = results
    assert tokens == wide_tokens
    assert all(torch.equal(logits[key], wide_logits[key]) for key in logits)
    assert kept_bytes < 0.6 * wide_bytes, "embedding and rotation stay in fp32"


def test_a_stored_matrix_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    model = build_reference("llama-tied", intermediate_size=96)
    model.config.intermediate_size = 128
    write_gguf(tmp_path / "m.gguf", model, "llama", Kind.Q8_0)
    with pytest.raises(ModelIOError, match=r"mlp\.gate_proj.*has shape \[96, 64\], .* says \[128, 64\]"):
        load_model(ModelConfig(str(tmp_path / "m.gguf"), dtype="fp32"))


@pytest.mark.parametrize(
    ("variant", "name"), [("qwen2-moe", "fp32"), ("qwen2-moe", "int4"), ("gemma3", "int8")]
)
def test_experts_and_codes_leave_memory_and_come_back(variant: str, name: str, make_engine: Maker) -> None:
    engine = make_engine(variant, dtype=name)
    prompts = [request(f"p{n}", random_prompt(n), 8) for n in (5, 60)]
    before = run_all(engine, prompts).tokens
    swapped = swap_out(engine._model.decoder, engine._model.device, 0)
    assert swapped.nbytes > 0.98 * engine.facts.weight_bytes, "biases stay"
    swapped.restore()
    assert run_all(engine, prompts).tokens == before


@pytest.mark.parametrize(
    ("precision", "flag", "expected"),
    [
        *((name, "auto", name) for name in FORMATS),
        ("int4", "bf16", "bf16"),
        ("", "int8", "int8"),
        ("highest", "auto", "auto"),
    ],
)
def test_a_build_asks_for_a_format_and_the_workers_flag_decides(
    precision: str, flag: str, expected: str, tiny: TinyModels
) -> None:
    path = tiny.path("llama-tied")
    build = pb.ModelStructConfig(model_name="m", model_path=str(path), matmul_precision=precision)
    check_config(build)
    record = ModelRecord("m", build.SerializeToString(), ModelState.BUILT)
    settings = WorkerSettings(model_root=(str(path.parent),), dtype=flag)
    assert model_config(record, settings).dtype == expected
