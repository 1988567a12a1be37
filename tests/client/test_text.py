"""Tokenizers, chat templates and incremental text."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from allspark import demo_model
from allspark.cli import generate
from allspark.cli.errors import CommandError
from allspark.text import encode_chat
from allspark_workers.text import TextError, TextStream, Tokenizer, load_tokenizer
from allspark_workers.text.chat import render_chat
from allspark_workers.text.gguf_header import read_header
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

TEXTS = [
    "Hello, world!",
    "  leading  and   multiple\n\n\tspaces \r\n end ",
    "Größe naïve café – “quotes” …",
    "日本語のテキスト、中文。한국어",
    "😀👍🏽 emoji 👨‍👩‍👧",
    "def f(x):\n    return x**2 # comment\n",
    "I'll we've DON'T can't",
    "Ἑλληνική Русский العربية עברית हिन्दी",
    "a\u0301 combining, \u200b zero width, \u00a0 no break",
    "<|im_start|>user\nhi<|im_end|>",
    "2024 and 1,234.5",
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(demo_model.fetch())


# ---- the demo model's tokenizer, out of its GGUF header ----------------------------------------------


@pytest.mark.slow
def test_same_ids_as_transformers(smollm: Tokenizer) -> None:
    """Its own reader, its own converter and its own template engine."""
    from transformers.integrations.gguf import convert_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import get_gguf_tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    architecture, parts, config = get_gguf_tokenizer(str(demo_model.fetch()))
    reference, _ = convert_gguf_tokenizer(architecture, parts)
    for text in TEXTS:
        assert smollm.encode(text) == reference.encode(text).ids, text
    template = config["chat_template"]
    (rendered,), _ = render_jinja_template([QUESTION], chat_template=template, add_generation_prompt=True)
    assert smollm.encode_chat(QUESTION) == reference.encode(rendered, add_special_tokens=False).ids


def test_digits_are_cut_apart_as_the_file_says(smollm: Tokenizer) -> None:
    """`tokenizer.ggml.pre` is smollm: every numeric character is a piece of its own."""
    assert smollm.encode("a ½ b") == [
        *smollm.encode("a "),
        *smollm.encode_piece("½"),
        *smollm.encode_piece(" b"),
    ]


def test_chat_prompt_of_the_demo_model(smollm: Tokenizer) -> None:
    ids = smollm.encode_chat([{"role": "system", "content": "Be brief."}, *QUESTION])
    im_start, im_end = 1, 2
    assert ids.count(im_start) == 3
    assert ids.count(im_end) == 2
    assert smollm.eos_ids == (im_end,)
    assert smollm.decode(ids) == (
        "system\nBe brief.\nuser\nWhat is the capital of France?\nassistant\n"  # control tokens left out
    )


@pytest.mark.parametrize("text", TEXTS)
def test_stream_gives_the_text_in_whole_characters(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    stream = smollm.stream()
    pieces = [stream.push([token]) for token in ids]
    rest = stream.flush()

    assert "".join(pieces) + rest == smollm.decode(ids)
    assert rest == ""
    assert not any("\ufffd" in piece for piece in pieces)


# ---- incremental text ---------------------------------------------------------------------------------


def decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 4), max_size=40))
def test_stream_of_single_bytes(text: str, sizes: list[int]) -> None:
    ids = list(text.encode())
    stream = TextStream(lambda ids: decode_bytes(list(ids)))
    pieces, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    pieces.append(stream.flush())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_shows_an_incomplete_end_and_never_waits_for_ever() -> None:
    stream = TextStream(lambda ids: decode_bytes(list(ids)))
    assert stream.push(list("é".encode())[:1]) == ""
    assert stream.flush() == "\ufffd"
    garbage = [stream.push([0xE4]) for _ in range(1000)]
    assert "".join(garbage) == "\ufffd" * 999


def test_long_stream_keeps_a_short_window() -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return decode_bytes(list(ids))

    text = "käse 日本 " * 100
    stream = TextStream(decode)
    assert "".join(stream.push([byte]) for byte in text.encode()) + stream.flush() == text
    assert max(seen) < 100


# ---- other sources ------------------------------------------------------------------------------------


def trained(pre: pre_tokenizers.PreTokenizer, *, is_nfc: bool = False) -> RawTokenizer:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre
    raw.decoder = decoders.ByteLevel()
    if is_nfc:
        raw.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(TEXTS * 3, trainer)
    raw.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return raw


def gguf_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_bytes(pairs: dict[str, object], version: int = 3) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs))
    for key, value in pairs.items():
        out += gguf_string(key)
        if isinstance(value, bool):
            out += struct.pack("<I?", 7, value)
        elif isinstance(value, int):
            out += struct.pack("<II", 4, value)
        elif isinstance(value, str):
            out += struct.pack("<I", 8) + gguf_string(value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            out += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
        elif isinstance(value, list):
            out += struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return out


def gguf_of(raw: RawTokenizer, pre: str, **more: object) -> bytes:
    model = json.loads(raw.to_str())["model"]
    size = raw.get_vocab_size()
    tokens = [raw.id_to_token(index) or "" for index in range(size)]
    pairs: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": size - 1,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    return gguf_bytes(pairs)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(
    ("name", "pre", "is_nfc"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False), False),
        ("qwen2", split_by(LLAMA3.replace("{1,3}", "")), True),
    ],
)
def test_gguf_tokenizer_equals_the_one_it_was_made_from(
    tmp_path: Path, name: str, pre: pre_tokenizers.PreTokenizer, is_nfc: bool
) -> None:
    raw = trained(pre, is_nfc=is_nfc)
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_of(raw, name))
    tokenizer = load_tokenizer(file)

    for text in [*TEXTS, "x<|end|>y"]:
        assert tokenizer.encode(text) == raw.encode(text).ids, text
    assert tokenizer.eos_ids == (raw.get_vocab_size() - 1,)


def test_llama3_gguf_begins_with_the_bos_token_and_takes_whole_pieces(tmp_path: Path) -> None:
    raw = trained(split_by(LLAMA3))
    bos = raw.token_to_id("<|end|>")
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_of(raw, "llama-bpe", tokenizer__ggml__bos_token_id=bos))
    assert load_tokenizer(file).encode("Hello") == [bos, *raw.encode("Hello").ids]

    file.write_bytes(
        gguf_of(raw, "llama-bpe", tokenizer__ggml__bos_token_id=bos, tokenizer__ggml__add_bos_token=False)
    )
    assert load_tokenizer(file).encode("Hello") == raw.encode("Hello").ids


@pytest.mark.parametrize(("kind", "pre"), [("llama", "default"), ("gpt2", "tekken")])
def test_unknown_tokenizer_is_refused_and_never_guessed(tmp_path: Path, kind: str, pre: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes({"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre}))
    with pytest.raises(TextError, match=f"kind '{kind}' with pre-tokenizer '{pre}'.*--tokenizer"):
        load_tokenizer(file)


@pytest.mark.parametrize("cut", [0, 3, 10, 30, 200, -1])
def test_truncated_or_foreign_file(tmp_path: Path, cut: int) -> None:
    whole = gguf_of(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2")
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[:cut])
    with pytest.raises(TextError, match=r"model\.gguf"):
        read_header(file)


def test_gguf_of_an_unknown_version(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes({"a": 1}, version=9))
    with pytest.raises(TextError, match="version 9"):
        read_header(file)


def hf_directory(path: Path, config: dict[str, object], generation: dict[str, object]) -> RawTokenizer:
    raw = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    raw.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(generation))
    return raw


def test_hugging_face_directory(tmp_path: Path) -> None:
    config = {
        "eos_token": {"content": "<|end|>"},
        "chat_template": "{{ messages[0]['content'] }}{{ eos_token }}",
    }
    raw = hf_directory(tmp_path, config, {"eos_token_id": [3, 4]})
    tokenizer = load_tokenizer(tmp_path)
    end = raw.token_to_id("<|end|>")

    assert tokenizer.eos_ids == (end, 3, 4)
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == [*raw.encode("Hi").ids, end]
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("Hi") == raw.encode("Hi").ids


def test_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "named"}]
    raw = hf_directory(tmp_path, {"chat_template": named}, {"eos_token_id": 5})
    assert load_tokenizer(tmp_path).encode_chat([]) == raw.encode("named").ids
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).encode_chat([]) == raw.encode("file").ids


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    with pytest.raises(TextError, match="name a model directory"):
        load_tokenizer(tmp_path / "none.gguf")
    hf_directory(tmp_path, {}, {})
    with pytest.raises(TextError, match="without --chat"):
        load_tokenizer(tmp_path).encode_chat(QUESTION)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TextError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)


# ---- templates are somebody else's code ---------------------------------------------------------------


def test_template_can_refuse() -> None:
    with pytest.raises(TextError, match="only one turn"):
        render_chat("{{ raise_exception('only one turn') }}", QUESTION, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% for x in range(10000000) %}{% endfor %}",
        "{{ missing.attribute }}",
        "{% if %}",
    ],
)
def test_template_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(TextError, match="cannot be applied"):
        render_chat(template, QUESTION, {})


def test_generate_gives_a_template_as_little_as_workers_do(tmp_path: Path) -> None:
    """300 MB would be there in the process itself; its own template came from somewhere, too."""
    template = "{% set x = 'a' * 300000000 %}{{ messages[0].content }}"
    hf_directory(tmp_path, {"chat_template": template}, {"eos_token_id": 5})
    command = ["Hi", "--chat", "--model=m", f"--tokenizer={tmp_path}", "--grpc=127.0.0.1:9"]
    with pytest.raises(CommandError, match="chat template cannot be applied: MemoryError"):
        generate.run(command)


def test_a_chat_has_the_ids_of_the_tokenizer_itself(tmp_path: Path) -> None:
    raw = hf_directory(tmp_path, {"chat_template": "{{ messages[0].content }}"}, {"eos_token_id": 5})
    tokenizer = load_tokenizer(tmp_path)
    assert (
        encode_chat(tokenizer, QUESTION)
        == tokenizer.encode_chat(QUESTION)
        == raw.encode(QUESTION[0]["content"]).ids
    )


def test_template_filters_do_not_escape_for_html() -> None:
    assert render_chat("{{ messages[0] | tojson }}", [{"content": "<é>"}], {}) == '{"content": "<é>"}'


# ---- vocabularies that fall back to bytes --------------------------------------------------------------


def sentencepiece_like() -> RawTokenizer:
    """As Llama 2 and Gemma: pieces with a mark for the space, and <0xNN> for what is in no piece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    raw = RawTokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


@given(st.lists(st.integers(1, 261), max_size=150), st.lists(st.integers(1, 5), max_size=60))
def test_stream_with_byte_fallback_is_the_text_of_all_ids(ids: list[int], sizes: list[int]) -> None:
    """Random runs of bytes, valid or not: what was given out is never taken back, however ids are grouped."""
    tokenizer = Tokenizer(sentencepiece_like())
    one_by_one, grouped = tokenizer.stream(), tokenizer.stream()
    pieces = [one_by_one.push([index]) for index in ids]
    at, parts = 0, []
    for size in [*sizes, len(ids)]:
        parts.append(grouped.push(ids[at : at + size]))
        assert "".join(parts) == "".join(pieces[: at + size])
        at += size
    assert "".join(pieces) + one_by_one.flush() == tokenizer.decode(ids)


def test_a_character_of_byte_tokens_comes_whole() -> None:
    raw = sentencepiece_like()
    ids = [raw.token_to_id("▁a"), *(1 + byte for byte in "日😀".encode()), raw.token_to_id("b")]
    stream = Tokenizer(raw).stream()
    assert [piece for index in ids if (piece := stream.push([index]))] == ["a", "日😀b"]
