"""Damaged model files raise what is documented, in bounded time and memory; nothing else ever comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from allspark_workers.engine.errors import EngineError, ModelIOError
from allspark_workers.models.architecture import Architecture
from allspark_workers.models.families import FAMILIES
from allspark_workers.models.gguf_families import ARCHITECTURES
from allspark_workers.models.gguf_file import GGUFFile
from allspark_workers.models.hf_config import read_architecture
from allspark_workers.models.lora_config import read_lora_config
from allspark_workers.models.rope import cos_sin_table, settled
from allspark_workers.models.safetensors_source import SafetensorsSource
from allspark_workers.text import TextError, load_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from tests.fuzz.fuzzing import FLOATS, NUMBERS, bounded_time, damaged_bytes, damaged_json, fuzz, nested
from tests.fuzz.gguf_files import ARRAY, CODES, DATA, STRING, Info, Pair, gguf_bytes, llama_infos, llama_pairs

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.1},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_theta": 10000.0}},
]
LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": False,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 4.0},
    "target_modules": ["q_proj", "v_proj"],
    "exclude_modules": "lm_.*",
    "layers_to_transform": [0, 1],
    "layers_pattern": "layers",
    "init_lora_weights": True,
    "bias": "none",
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "padding": {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
        "pad_to_multiple_of": None,
    },
    "added_tokens": [
        {
            "id": 4,
            "content": "</s>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "post_processor": None,
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {
        "type": "BPE",
        "unk_token": "a",
        "byte_fallback": True,
        "vocab": {"a": 0, "b": 1, "ab": 2, "<0x41>": 3},
        "merges": [["a", "b"]],
    },
}
BESIDE: dict[str, Any] = {
    "bos_token": "a",
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "x"}],
    "eos_token_id": [4, 1],
}


def hf_config(family: str, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [FAMILIES[family].hf_class],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": rope,
        "eos_token_id": [1, 2],
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 50.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def use(arch: Architecture) -> None:
    """What is computed of an architecture before any tensor is read."""
    assert arch.num_parameters > 0 and len(repr(arch)) < 1_000_000
    for rope in (arch.rope, arch.local_rope):
        if rope is not None and rope.rotary_dim <= 4096:
            for length in (16, rope.original_max_positions + 1):
                assert cos_sin_table(settled(rope, length), 4).shape == (4, rope.rotary_dim)


configs = st.builds(hf_config, st.sampled_from(sorted(FAMILIES)), st.sampled_from(ROPES))
LLAMA = hf_config("llama", ROPES[0])
GEMMA = {key: value for key, value in hf_config("gemma2", ROPES[0]).items() if key != "layer_types"}


@fuzz(400)
@given(data=configs.flatmap(damaged_json))
@example(data=nested(100_000))
@example(data=json.dumps(GEMMA | {"num_hidden_layers": 10**12}).encode())
@example(data=json.dumps(LLAMA | {"num_attention_heads": 0, "head_dim": 0}).encode())
@example(data=json.dumps(LLAMA | {"num_hidden_layers": float("inf")}).encode())
@example(data=json.dumps(LLAMA | {"rope_parameters": [1]}).encode())
@example(data=json.dumps(GEMMA | {"query_pre_attn_scalar": -4}).encode())
@example(data=json.dumps(LLAMA | {"rope_parameters": ROPES[2] | {"beta_fast": -1}}).encode())
@example(data=json.dumps(LLAMA | {"rope_parameters": ROPES[2] | {"beta_fast": 1e308}}).encode())
@example(data=json.dumps(LLAMA | {"rope_parameters": ROPES[2] | {"beta_slow": 1e-320}}).encode())
def test_a_damaged_config_is_refused_or_describes_a_model(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    with bounded_time():
        try:
            use(read_architecture(folder))
        except EngineError as error:
            assert 0 < len(str(error)) < 10_000


@st.composite
def damaged_gguf(draw: st.DrawFn) -> bytes:
    arch = draw(st.sampled_from(sorted(ARCHITECTURES)))
    pairs, infos = llama_pairs(arch), llama_infos()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pairs) - 1))
        kind = draw(st.sampled_from([*CODES, STRING, ARRAY]))
        pairs[at] = Pair(pairs[at].key, kind, _odd(draw, kind))
    if draw(st.booleans()):
        at, size = draw(st.integers(0, len(infos) - 1)), st.sampled_from([1, 2, 4, 5, 32, 64, *NUMBERS[:-1]])
        dims = tuple(draw(st.lists(size, min_size=0, max_size=5)))
        infos[at] = Info(infos[at].name, dims, draw(st.integers(0, 40)), draw(size))
    data = gguf_bytes(pairs, infos, DATA)
    return draw(damaged_bytes(data)) if draw(st.integers(0, 3)) == 0 else data


def _odd(draw: st.DrawFn, kind: int) -> Any:
    if kind == STRING:
        return draw(st.sampled_from(["", "x", "linear", "qwen2", "llama-bpe", "\0", "é" * 300]))
    if kind == ARRAY:
        item = draw(st.sampled_from([4, 5, 6, STRING, ARRAY]))
        return item, [_odd(draw, item) for _ in range(draw(st.integers(0, 3)))]
    return draw(st.sampled_from([0.0, 1e30, *FLOATS[-3:]] if CODES[kind] in "fd" else NUMBERS))


def pairs_with(key: str, kind: int, value: Any, arch: str = "llama") -> bytes:
    pairs = [Pair(p.key, kind, value) if p.key.endswith(key) else p for p in llama_pairs(arch)]
    return gguf_bytes(pairs, llama_infos(), DATA)


def deep_gguf(depth: int) -> bytes:
    """Written flat: the arrays of one item each are twelve bytes apart."""
    marker = "general.deep"
    data = gguf_bytes([Pair(marker, ARRAY, (4, [])), *llama_pairs()], llama_infos(), b"")
    at = data.index(marker.encode()) + len(marker) + 4
    return data[:at] + (b"\x09\0\0\0" + b"\1" + bytes(7)) * depth + data[at:] + bytes(64) + DATA


@fuzz(250)
@given(data=damaged_gguf())
@example(data=gguf_bytes(llama_pairs(), llama_infos(), DATA))
@example(data=deep_gguf(100_000))
@example(data=gguf_bytes(llama_pairs("qwen2moe"), [Info("blk.0.ffn_gate_exps.weight", (32,), 0, 0)], DATA))
@example(data=pairs_with("block_count", 10, 2**62, "gemma2"))
@example(data=pairs_with("attention.head_count", 4, 0))
@example(data=pairs_with("context_length", 6, float("inf")))
@example(data=pairs_with("ggml.tokens", 4, 7))
@example(data=pairs_with("ggml.bos_token_id", 5, -1))
@example(data=pairs_with("ggml.pre", ARRAY, (4, [1])))
def test_a_damaged_gguf_file_is_refused_or_readable(data: bytes, folder: Path) -> None:
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    with bounded_time():
        try:
            file = GGUFFile(path)
            use(file.architecture)
            for name in file.names():
                file.stored(name)
                file.get(name)
        except EngineError as error:
            assert 0 < len(str(error)) < 10_000
    with bounded_time():
        try:
            load_tokenizer(path).encode("ab")
        except TextError as error:
            assert 0 < len(str(error)) < 10_000


def test_the_files_that_are_damaged_are_valid(folder: Path) -> None:
    for family in FAMILIES:
        layered = FAMILIES[family].local_rope_theta is not None
        (folder / "config.json").write_text(json.dumps(hf_config(family, ROPES[4 if layered else 0])))
        use(read_architecture(folder))
    path = folder / "whole.gguf"
    path.write_bytes(gguf_bytes(llama_pairs(), llama_infos(), DATA))
    assert GGUFFile(path).get("model.layers.0.self_attn.q_proj.weight").shape == (32, 32)
    assert load_tokenizer(path).encode("ab") == [3, 2]
    (folder / "adapter_config.json").write_text(json.dumps(LORA))
    assert read_lora_config(folder).rank_of("model.layers.0.self_attn.q_proj") == 2


@fuzz(300)
@given(data=damaged_json(LORA))
@example(data=nested(100_000))
@example(data=json.dumps(LORA | {"rank_pattern": ["q_proj"]}).encode())
@example(data=json.dumps(LORA | {"lora_alpha": 10**400}).encode())
@example(data=json.dumps(LORA | {"target_modules": "(" * 9000 + ")" * 9000}).encode())
@example(data=json.dumps(LORA | {"target_modules": "a{99999999999999999999}"}).encode())
def test_a_damaged_adapter_configuration_is_refused_or_usable(data: bytes, folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(data)
    with bounded_time():
        try:
            config = read_lora_config(folder)
        except EngineError as error:
            assert len(str(error)) < 30_000
        else:
            for module in ("model.layers.1.self_attn.q_proj", "lm_head"):
                config.covers(module)
                assert config.rank_of(module) > 0


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "layers_pattern", "rank_pattern"])
def test_a_regular_expression_that_would_match_for_ever_is_named(field: str, folder: Path) -> None:
    endless = "(.|[a-z.])*[A-Z]"
    value = {endless: 2} if field == "rank_pattern" else endless
    more = {"exclude_modules": None} if field != "exclude_modules" else {}
    if field == "layers_pattern":
        more["target_modules"] = ["all"]
    fields = LORA | more | {field: value}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    config = read_lora_config(folder)
    with bounded_time(), pytest.raises(ModelIOError, match="takes too long"):
        config.covers("model.layers.11.self_attn.q_proj.model.layers.11.all")
        config.rank_of("model.layers.11.self_attn.q_proj.model.layers.11.all")


INDEX = {"weight_map": {"a": "model.safetensors"}}
WEIGHTS = save({"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.float16)})


@fuzz(250)
@given(
    data=damaged_bytes(WEIGHTS, head=200),
    index=st.none() | damaged_json({"weight_map": {"a": "model.safetensors"}}),
)
@example(data=(2**62).to_bytes(8, "little") + WEIGHTS[8:], index=None)
@example(data=WEIGHTS, index=nested(100_000))
@example(data=WEIGHTS, index=json.dumps({"weight_map": {"a": "é" * 300}}).encode())
@example(data=WEIGHTS, index=json.dumps({"weight_map": {"a": "é/" * 30_000}}).encode())
def test_damaged_safetensors_are_refused_or_readable(data: bytes, index: bytes | None, folder: Path) -> None:
    directory = folder / "weights"
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(data)
    listing = directory / "model.safetensors.index.json"
    listing.unlink(missing_ok=True)
    if index is not None:
        listing.write_bytes(index)
    with bounded_time():
        try:
            source = SafetensorsSource(directory)
            for name in source.names():
                source.get(name)
        except EngineError as error:
            assert 0 < len(str(error)) < 10_000


@fuzz(250)
@given(data=damaged_json(TOKENIZER), beside=damaged_json(BESIDE))
@example(data=nested(100_000), beside=b"{}")
@example(data=json.dumps(TOKENIZER).encode(), beside=nested(100_000))
@example(data=json.dumps(TOKENIZER).encode(), beside=b'{"eos_token_id": [[1]]}')
@example(data=json.dumps(TOKENIZER).encode(), beside=b'{"chat_template": [1]}')
def test_a_damaged_tokenizer_is_refused_or_usable(data: bytes, beside: bytes, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    for name in ("tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes(beside)
    with bounded_time():
        try:
            tokenizer = load_tokenizer(folder)
        except TextError as error:
            assert 0 < len(str(error)) < 10_000
        else:
            assert all(isinstance(index, int) for index in tokenizer.eos_ids)
            assert tokenizer.vocab_size >= 0 and tokenizer.control_ids is not None


def test_a_tokenizer_that_pads_to_a_million_million_tokens_does_not_pad(folder: Path) -> None:
    padded = TOKENIZER | {"padding": TOKENIZER["padding"] | {"strategy": {"Fixed": 10**12}}}
    (folder / "padded").mkdir()
    path = folder / "padded" / "tokenizer.json"
    path.write_text(json.dumps(padded))
    assert load_tokenizer(path).encode("ab" * 30) == [2] * 30


def test_a_configuration_of_gigabytes_is_not_read(folder: Path) -> None:
    path = folder / "config.json"
    with path.open("wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(ModelIOError, match="has more than 16777216 bytes"):
        read_architecture(folder)
