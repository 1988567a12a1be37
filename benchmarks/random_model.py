"""A model of random weights, as a Hugging Face directory: for figures, where no real one can be had.

    python benchmarks/random_model.py SHAPE DIRECTORY [--device cuda:0]

SHAPE is 0.5b or 7b (those of Qwen2.5), or tiny. Weights are bf16.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

# Width, layers, heads, KV heads, MLP width, vocabulary, whether output matrix and embedding are one.
SHAPES = {
    "tiny": (64, 2, 4, 2, 96, 1000, True),
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
}
SCALE = 0.02


def config_of(shape: str) -> dict[str, object]:
    """config.json, readable by old and new versions of transformers."""
    width, layers, heads, kv_heads, inner, vocabulary, is_tied = SHAPES[shape]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
    }


def weights_of(shape: str, device: str) -> dict[str, torch.Tensor]:
    """Every tensor by name."""
    width, layers, heads, kv_heads, inner, vocabulary, is_tied = SHAPES[shape]
    rows = {"q": width, "k": width // heads * kv_heads, "v": width // heads * kv_heads}
    generator = torch.Generator(device).manual_seed(0)
    found: dict[str, torch.Tensor] = {}

    def put(name: str, *size: int) -> None:
        values = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        found[name] = values.mul_(SCALE).cpu()

    put("model.embed_tokens.weight", vocabulary, width)
    if not is_tied:
        put("lm_head.weight", vocabulary, width)
    for layer in (f"model.layers.{index}." for index in range(layers)):
        for name, count in rows.items():
            put(f"{layer}self_attn.{name}_proj.weight", count, width)
            put(f"{layer}self_attn.{name}_proj.bias", count)
        put(f"{layer}self_attn.o_proj.weight", width, width)
        put(f"{layer}mlp.gate_proj.weight", inner, width)
        put(f"{layer}mlp.up_proj.weight", inner, width)
        put(f"{layer}mlp.down_proj.weight", width, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    found["model.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    return found


def make(shape: str, directory: Path, device: str) -> Path:
    """Write the model; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(shape), indent=1))
    save_file(weights_of(shape, device), directory / "model.safetensors", {"format": "pt"})
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    make(args.shape, args.directory, args.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
