"""Small GGUF files with any contents, also such as no writer produces (layout: ggml's docs/gguf.md)."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

STRING, ARRAY = 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_WIDE = {"B": 1, "H": 2, "I": 4, "Q": 8, "b": 1, "h": 2, "i": 4, "q": 8}


class Pair(NamedTuple):
    """Metadata; an array's value is (kind of its items, items)."""

    key: str
    kind: int
    value: Any


class Info(NamedTuple):
    """A tensor's entry, `dims` fastest first as in the file."""

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(str(value))
    if kind == ARRAY:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(_value(item, v) for v in values)
    code = CODES[kind]
    if code in _WIDE:
        size = _WIDE[code]
        return (int(value) % (1 << 8 * size)).to_bytes(size, "little")
    return struct.pack("<" + code, value)


def gguf_bytes(pairs: list[Pair], infos: list[Info], data: bytes) -> bytes:
    """A file of version 3."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs))
    for key, kind, value in pairs:
        head += _string(key) + struct.pack("<I", kind) + _value(kind, value)
    for name, dims, kind, offset in infos:
        sizes = b"".join(struct.pack("<Q", dim % 2**64) for dim in dims)
        head += (
            _string(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset % 2**64)
        )
    return head + bytes(-len(head) % 32) + data


def llama_pairs(arch: str = "llama") -> list[Pair]:
    """A model of two layers and a tokenizer of five tokens."""
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8}
    sizes |= {"rope.dimension_count": 8, "rope.scaling.original_context_length": 32}
    sizes |= {"attention.sliding_window": 16}
    if arch.endswith("moe"):
        sizes |= {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
        sizes |= {"expert_shared_feed_forward_length": 32}
    floats = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.scaling.factor": 2.0}
    tokenizer = "tokenizer.ggml."
    return [
        Pair("general.architecture", STRING, arch),
        Pair("general.alignment", 4, 32),
        *(Pair(f"{arch}.{name}", 4, value) for name, value in sizes.items()),
        *(Pair(f"{arch}.{name}", 6, value) for name, value in floats.items()),
        Pair(f"{arch}.rope.scaling.type", STRING, "yarn"),
        Pair(tokenizer + "model", STRING, "gpt2"),
        Pair(tokenizer + "pre", STRING, "gpt-2"),
        Pair(tokenizer + "tokens", ARRAY, (STRING, ["a", "b", "ab", "<s>", "</s>"])),
        Pair(tokenizer + "token_type", ARRAY, (5, [1, 1, 1, 3, 3])),
        Pair(tokenizer + "merges", ARRAY, (STRING, ["a b"])),
        Pair(tokenizer + "eos_token_id", 4, 4),
        Pair(tokenizer + "bos_token_id", 4, 3),
        Pair(tokenizer + "add_bos_token", 7, True),
        Pair("tokenizer.chat_template", STRING, "{{ messages[0].content }}"),
    ]


def llama_infos() -> list[Info]:
    """Embedding, one rotated matrix and divisors, of 32-bit and of quantised numbers."""
    return [
        Info("token_embd.weight", (32, 5), 0, 0),
        Info("blk.0.attn_q.weight", (32, 32), 8, 640),  # Q8_0: 34 bytes for 32 values
        Info("blk.0.ffn_gate_exps.weight", (32, 2, 2), 1, 1728),
        Info("rope_freqs.weight", (4,), 0, 1984),
    ]


#: All zero but the divisors, which are one.
DATA = bytes(1984) + struct.pack("<4f", 1, 1, 1, 1)
