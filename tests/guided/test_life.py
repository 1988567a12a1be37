"""Guided requests among others: resumed, pre-empted, cut short, at a dead end, with two vocabularies."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.engine.engine import Engine
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.engine.engine_helpers import run_all
from tests.guided.conftest import EOS, PROMPT, EngineMaker, Guided, config, guided_request, guides_of

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 12},
        "ids": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        "mood": {"enum": ["good", "schlecht", "日本"]},
    },
    "required": ["name", "ids", "mood"],
    "additionalProperties": False,
}
SCHEMA = config(type="json_schema", json_schema=json.dumps(PERSON))
REGEX = config(type="regex", regex=r"[a-z]{10,30}(, [a-z]{4}){3}")


def alone(engine: Engine, request_config: pb.GenerateConfig, **fields: Any) -> tuple[list[int], str]:
    """Tokens and reason of one request with the engine to itself."""
    (guide,) = guides_of(engine, [request_config])
    result = run_all(engine, [guided_request("a", guide, **fields)])
    return result.tokens["a"], result.finish("a")


def test_a_request_resumed_in_the_middle_of_its_document_equals_the_undisturbed_one(
    make_engine: EngineMaker, tiny: Guided
) -> None:
    engine = make_engine()
    tokens, reason = alone(engine, SCHEMA, new=300)
    assert reason == "eos"
    jsonschema.validate(json.loads(tiny.decode(tokens)), PERSON)
    cuts = [1, 2, 7, len(tokens) // 2, len(tokens) - 1, len(tokens)]
    guides = guides_of(engine, [SCHEMA] * len(cuts), [tokens[:cut] for cut in cuts])
    requests = [
        guided_request(f"{cut}", guide, new=300, generated=tokens[:cut])
        for cut, guide in zip(cuts, guides, strict=True)
    ]
    result = run_all(engine, requests)
    for cut in cuts:
        assert tokens[:cut] + result.tokens[f"{cut}"] == tokens
        assert result.finish(f"{cut}") == "eos"


def test_neighbours_chunks_and_preemption_do_not_change_a_document(make_engine: EngineMaker) -> None:
    engine = make_engine()
    expected = {
        "schema": alone(engine, SCHEMA, new=300, seed=5)[0],
        "regex": alone(engine, REGEX, new=300, seed=6)[0],
        "free": alone(engine, pb.GenerateConfig(), new=150, seed=7, early_stopping=False)[0],
    }
    # A pool for about two of the three, and prompts in pieces.
    span_bytes = engine.facts.span_bytes * 2 * engine.facts.num_layers
    small = make_engine(kv_bytes=span_bytes * 5, prefill_chunk=2, span_size=16)
    guides = guides_of(small, [SCHEMA, REGEX, pb.GenerateConfig()])
    requests = [
        guided_request(name, guide, new=new, seed=seed, early_stopping=name != "free")
        for (name, new, seed), guide in zip(
            [("schema", 300, 5), ("regex", 300, 6), ("free", 150, 7)], guides, strict=True
        )
    ]
    result = run_all(small, requests)
    assert small._scheduler.num_preemptions > 0
    assert result.tokens == expected


def test_each_of_several_sequences_has_its_own_place_in_the_document(
    make_engine: EngineMaker, tiny: Guided
) -> None:
    """Undisturbed, and resumed when the first of them was half done."""
    engine = make_engine()
    (guide,) = guides_of(engine, [SCHEMA])
    result = run_all(engine, [guided_request("a", guide, new=300, num_return_sequences=3)])
    others = [result.ends["a"].tensors[f"sequence_{i}"].tolist() for i in (1, 2)]
    texts = [tiny.decode(tokens) for tokens in (result.tokens["a"], *others)]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    head = result.tokens["a"][:9]
    (guide,) = guides_of(engine, [SCHEMA], [head])
    again = run_all(engine, [guided_request("b", guide, new=300, num_return_sequences=3, generated=head)])
    assert head + again.tokens["b"] == result.tokens["a"]
    assert [again.ends["b"].tensors[f"sequence_{i}"].tolist() for i in (1, 2)] == others


def test_beams_are_refused(make_engine: EngineMaker) -> None:
    engine = make_engine()
    (guide,) = guides_of(engine, [SCHEMA])
    with pytest.raises(ValueError, match="beams cannot be guided"):
        engine.submit(guided_request("a", guide, num_beams=2, do_sample=False))


def test_a_document_without_eos_ends_when_nothing_can_follow(make_engine: EngineMaker, tiny: Guided) -> None:
    engine = make_engine()
    tokens, reason = alone(engine, config(eos=-1, type="regex", regex="ab[cd]{4}"), eos_token_id=None)
    assert (reason, re.fullmatch("ab[cd]{4}", tiny.decode(tokens)) is not None) == ("complete", True)
    assert EOS not in tokens
    # It could go on, so it does: only its length ends it.
    tokens, reason = alone(engine, config(eos=-1, type="regex", regex="[cd]*"), eos_token_id=None, new=20)
    assert (reason, len(tokens)) == ("length", 20)


def test_eos_ends_a_document_even_without_early_stopping(make_engine: EngineMaker) -> None:
    tokens, reason = alone(make_engine(), config(type="regex", regex="ab"), early_stopping=False)
    assert (reason, tokens[-1]) == ("complete", EOS)


def test_a_control_token_among_the_stop_words_may_end_a_document(
    make_engine: EngineMaker, tiny: Guided
) -> None:
    """Models with two end tokens: eos_token_id has one, a stop word the other."""
    engine, stop = make_engine(), tiny.tokenizer.token_to_id("<|stop|>")
    wanted = config(eos=-1, stop_words=[[stop]], type="regex", regex="ab[cd]{4}")
    tokens, reason = alone(engine, wanted, eos_token_id=None, stop_words=((stop,),))
    assert (reason, tokens[-1]) == ("stop_words", stop)
    assert re.fullmatch("ab[cd]{4}", tiny.decode(tokens))


def test_stop_words_lengths_and_min_length_work_as_ever(make_engine: EngineMaker, tiny: Guided) -> None:
    engine = make_engine()
    digits = config(type="regex", regex="[0-9]+")
    full, _ = alone(engine, digits, early_stopping=False, min_length=104, new=100)
    assert len(full) == 100 and EOS not in full  # min_length held eos back
    word = tuple(full[10:12])
    tokens, reason = alone(engine, digits, stop_words=(word,), min_length=104, new=100)
    assert reason == "stop_words" and tuple(tokens[-2:]) == word
    assert tokens == full[: len(tokens)]
    # Only eos is left, although the text is too short: the mask comes after the ban (spec 2.5.7).
    tokens, reason = alone(engine, config(type="regex", regex="abc"), min_length=100)
    assert (reason, tiny.decode(tokens)) == ("eos", "abc")


def test_penalties_apply_before_the_mask(make_engine: EngineMaker, tiny: Guided) -> None:
    """No digit may come twice in a row: with bad words, and nothing but digits allowed."""
    engine = make_engine()
    ids = [tiny.tokenizer.token_to_id(d) for d in "0123456789"]
    tokens, _ = alone(
        engine, config(type="regex", regex="[0-9]{60}"), bad_words=tuple((i, i) for i in ids), new=70
    )
    text = tiny.decode(tokens)
    assert re.fullmatch("[0-9]{60}", text)
    singles = [token for token in tokens if token in ids]
    assert len(singles) > 20 and not re.search(r"([1-9])\1", text.replace("00", "").replace("12", ""))


def entries_of(tiny: Guided, without: str = "") -> dict[str, int]:
    """The tokenizer's raw entries, except for the tokens that hold one of these characters."""
    lost = {bytes_to_unicode()[value] for value in without.encode()}
    vocab = tiny.tokenizer.get_vocab(with_added_tokens=True)
    return {entry: index for entry, index in vocab.items() if not lost & set(entry)}


def test_a_dead_end_interrupts_its_request_with_a_reason_and_no_other(
    make_engine: EngineMaker, tiny: Guided
) -> None:
    engine = make_engine()
    # The vocabulary cannot spell what the document needs after its tenth letter.
    lost = config(vocab=entries_of(tiny, "7"), vocab_type=pb.VOCAB_TYPE_BPE, type="regex", regex="[a-c]{10}7")
    guides = guides_of(engine, [lost, SCHEMA])
    tokens, _ = alone(engine, SCHEMA, new=300, seed=9)
    result = run_all(
        engine, [guided_request("lost", guides[0]), guided_request("fine", guides[1], new=300, seed=9)]
    )
    assert result.finish("lost") == "grammar"
    assert "no token of the vocabulary" in result.ends["lost"].message
    assert len(tiny.decode(result.tokens["lost"])) in (9, 10)
    assert (result.tokens["fine"], result.finish("fine")) == (tokens, "eos")


def test_a_mask_that_costs_too_much_interrupts_its_request_and_no_other(
    make_engine: EngineMaker, tiny: Guided
) -> None:
    engine = make_engine()
    heavy = config(type="regex", regex=r"(\p{L}{1,300}\d?){300}!")
    guides = guides_of(engine, [heavy, SCHEMA])
    tokens, _ = alone(engine, SCHEMA, new=300, seed=9)
    result = run_all(
        engine,
        [guided_request("heavy", guides[0], new=400), guided_request("fine", guides[1], new=300, seed=9)],
    )
    assert result.finish("heavy") == "grammar"
    assert "too many expressions" in result.ends["heavy"].message and len(result.tokens["heavy"]) > 3
    assert (result.tokens["fine"], result.finish("fine")) == (tokens, "eos")


def test_a_step_that_fails_leaves_the_documents_where_they_were(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch fails once after the masks were begun, then every row runs alone."""
    engine = make_engine()
    expected = {name: alone(engine, SCHEMA, new=300, seed=seed)[0] for name, seed in (("a", 1), ("b", 2))}
    runner: Any = engine._runner
    original, calls = runner._sampler.sample, []

    def failing(*args: Any) -> list[int]:
        calls.append(len(args[2]))
        if len(calls) in (3, 9):
            raise RuntimeError("a failure of the device")
        return original(*args)

    monkeypatch.setattr(runner._sampler, "sample", failing)
    guides = guides_of(engine, [SCHEMA, SCHEMA])
    result = run_all(
        engine, [guided_request(n, g, new=300, seed=s) for n, g, s in zip("ab", guides, (1, 2), strict=True)]
    )
    assert calls[2:5] == [2, 1, 1]
    assert result.tokens == expected


def as_sentencepiece(tiny: Guided) -> dict[str, int]:
    """The same tokens in the other spelling: U+2581 for a space, <0xNN> for a byte that is no character."""
    byte_of = {char: value for value, char in bytes_to_unicode().items()}
    vocab = {}
    for entry, index in tiny.tokenizer.get_vocab(with_added_tokens=True).items():
        if entry.startswith("<|"):
            vocab[entry] = index
            continue
        data = bytes(byte_of[char] for char in entry)
        try:
            text = data.decode().replace(" ", "\u2581")
        except UnicodeDecodeError:
            text = f"<0x{data[0]:02X}>" if len(data) == 1 else ""
        if data in (b"\x00", b"\xff"):
            text = f"<0x{data[0]:02X}>"
        if text:
            vocab[text] = index
    return vocab


@pytest.mark.parametrize("kind", ["WPM", "SPM", "UGM", "BPE"])
def test_every_vocab_type_spells_the_same_document(make_engine: EngineMaker, tiny: Guided, kind: str) -> None:
    """BPE with bytes as <0xNN> is SentencePiece that was saved as BPE; the reference is byte-level BPE."""
    engine, fields = make_engine(), {"type": "regex", "regex": r"[a-z é日本\n]{20,60}: true"}
    vocab = as_sentencepiece(tiny)
    same = {entry: index for entry, index in entries_of(tiny).items() if index in vocab.values()}
    expected, _ = alone(engine, config(vocab=same, vocab_type=pb.VOCAB_TYPE_BPE, **fields), new=100)
    vocab_type = pb.VocabType.Value(f"VOCAB_TYPE_{kind}")
    tokens, reason = alone(engine, config(vocab=vocab, vocab_type=vocab_type, **fields), new=100)
    assert (tokens, reason) == (expected, "eos")
    text = tiny.decode(tokens)
    assert re.fullmatch(fields["regex"], text) and " " in text and not text.isascii()


def test_two_vocabularies_in_one_process(make_engine: EngineMaker, tiny: Guided) -> None:
    """Ids mean other texts in the second one; the batch holds both, and the model's own."""
    engine = make_engine()
    first = entries_of(tiny)
    size, shift = len(first), 37
    second = {
        entry: index if index < 4 else 4 + (index - 4 + shift) % (size - 4) for entry, index in first.items()
    }
    configs = [
        config(vocab=vocab, vocab_type=pb.VOCAB_TYPE_BPE, type="json_schema", json_schema=json.dumps(PERSON))
        for vocab in (first, second)
    ]
    guides = guides_of(engine, [*configs, SCHEMA])
    result = run_all(
        engine, [guided_request(f"{i}", guide, new=300, seed=3) for i, guide in enumerate(guides)]
    )
    back = {index: text for text, index in first.items()}
    unshifted = {second[text]: index for index, text in back.items()}
    for key in "012":
        tokens = result.tokens[key]
        text = tiny.decode([unshifted[t] for t in tokens] if key == "1" else tokens)
        assert result.finish(key) == "eos"
        jsonschema.validate(json.loads(text), PERSON)
    assert result.tokens["1"] != result.tokens["0"]


def test_control_tokens_of_a_vocabulary_are_never_text(make_engine: EngineMaker, tiny: Guided) -> None:
    engine = make_engine()
    wanted = config(vocab=entries_of(tiny), vocab_type=pb.VOCAB_TYPE_BPE, type="regex", regex="[<|a-z>]{200}")
    tokens, reason = alone(engine, wanted, new=250)
    assert reason == "eos" and min(tokens[:-1]) > 3
    assert len(PROMPT) + len(tokens) < 256
