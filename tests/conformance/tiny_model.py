"""A tiny random Llama as a Hugging Face directory, with a tokenizer of single characters and an adapter."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

SEED = 20_251_201
HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
MAX_LENGTH = 131_072  # long enough for requests that run for seconds, and for prompts that no KV pool holds
PAD, BOS, EOS = 0, 1, 2
#: Byte-level tokens (GPT-2's alphabet): printable ASCII, then blank and newline as that alphabet spells them.
CHARACTERS = [chr(c) for c in range(0x21, 0x7F)] + ["\u0120", "\u010a"]
VOCAB = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {c: 3 + i for i, c in enumerate(CHARACTERS)}
VOCAB_SIZE = 112  # a few rows more than the tokenizer has entries, as real checkpoints do
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"


ADAPTER = "conformance-adapter"
BROKEN = "conformance-broken"
#: Others, more than three workers can have in memory (--lora-max-num 5 each).
FURTHER = tuple(f"{ADAPTER}-{i}" for i in range(15))
RANK, ALPHA = 4, 8
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def write(directory: Path) -> Path:
    """Makes the model in `directory`; the same bytes on every machine.

    LoRA adapters lie in it, and the model with the first one merged into its weights beside it, at
    `<directory>-merged`.
    """
    weights = _weights()
    _write_model(directory, weights)
    adapter = _adapter(weights)
    _write_adapter(directory / ADAPTER, adapter)
    for i, name in enumerate(FURTHER, 2):
        _write_adapter(directory / name, _adapter(weights, SEED + i))
    _write_adapter(directory / BROKEN, adapter)
    (directory / BROKEN / "adapter_model.safetensors").write_bytes(b"not safetensors")
    _write_model(directory.with_name(f"{directory.name}-merged"), _merged(weights, adapter))
    return directory


def _write_model(directory: Path, weights: dict[str, NDArray[np.float32]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
        "transformers_version": "5.24.0",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    _write_tokenizer(directory)


def _adapter(weights: dict[str, NDArray[np.float32]], seed: int = SEED + 1) -> dict[str, NDArray[np.float32]]:
    """A and B of every adapted matrix, under the model's names for it."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(ADAPTED):
            rows, columns = weight.shape
            pairs[f"{module}.lora_A"] = rng.normal(0.0, 0.2, (RANK, columns)).astype(np.float32)
            pairs[f"{module}.lora_B"] = rng.normal(0.0, 0.2, (rows, RANK)).astype(np.float32)
    return pairs


def _merged(
    weights: dict[str, NDArray[np.float32]], adapter: dict[str, NDArray[np.float32]]
) -> dict[str, NDArray[np.float32]]:
    """W + alpha / r B A."""
    merged = dict(weights)
    for name, up in adapter.items():
        if name.endswith(".lora_B"):
            module = name.removesuffix(".lora_B")
            product = up.astype(np.float64) @ adapter[f"{module}.lora_A"].astype(np.float64)
            merged[f"{module}.weight"] = (weights[f"{module}.weight"] + ALPHA / RANK * product).astype(
                np.float32
            )
    return merged


def _write_adapter(directory: Path, adapter: dict[str, NDArray[np.float32]]) -> None:
    """In the layout of the peft library."""
    directory.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in ADAPTED}),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"base_model.model.{name}.weight": value for name, value in adapter.items()}
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})


def _weights() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(SEED)

    def normal(*shape: int, mean: float = 0.0, deviation: float = 0.2) -> NDArray[np.float32]:
        return rng.normal(mean, deviation, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN),
        "lm_head.weight": normal(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": normal(HIDDEN, mean=1.0),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", INTER, HIDDEN),
            ("mlp.up_proj", INTER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTER),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = normal(HIDDEN, mean=1.0)
    return weights


def _write_tokenizer(directory: Path) -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t} | special for t, i in VOCAB.items() if i <= EOS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": VOCAB,
            "merges": [],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
