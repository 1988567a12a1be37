"""Section 2.5: fields of GenerateConfig about one sequence of tokens, against an independent reference."""

from collections.abc import Callable
from typing import Any

from allspark_proto import allspark_service_pb2 as pb

from tests.conformance import oracle
from tests.conformance.server import FINISHED, OK, Server, request
from tests.conformance.suite import add, case

C = "GenerateConfig."
PROMPT = [5, 9, 6, 5, 9, 7, 5]
NEW = 24


def _greedy_row(config: dict[str, Any], differs: bool) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        tokens = s.generate(PROMPT, new=NEW, **config)
        assert len(tokens) == NEW
        oracle.check_greedy(s.reference_path, PROMPT, tokens, **config)
        if differs:
            assert tokens != s.generate(PROMPT, new=NEW), "the setting has an effect on this prompt"

    return run


GREEDY: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("2.5.4", "do_sample false is greedy", {"do_sample": False, "temperature": 5.0, "top_k": 50}, False),
    ("2.5.4", "temperature zero is greedy", {"do_sample": True, "temperature": 0.0}, False),
    ("2.5.4", "temperature below zero is greedy", {"do_sample": True, "temperature": -1.0}, False),
    ("2.5.4", "top_k one is greedy", {"do_sample": True, "temperature": 2.0, "top_k": 1}, False),
    ("2.5.3", "repetition_penalty over one", {"repetition_penalty": 1.8}, True),
    ("2.5.3", "repetition_penalty below one", {"repetition_penalty": 0.6}, True),
    ("2.5.3", "repetition_penalty on generated tokens only",
     {"repetition_penalty": 1.8, "suppress_repetition_in_generation": True}, True),
    ("2.5.3", "presence_penalty counts generated tokens only", {"presence_penalty": 2.0}, True),
    ("2.5.3", "presence_penalty below zero", {"presence_penalty": -2.0}, True),
    ("2.5.3", "no_repeat_ngram_size one", {"no_repeat_ngram_size": 1}, True),
    ("2.5.3", "no_repeat_ngram_size two", {"no_repeat_ngram_size": 2, "presence_penalty": -2.0}, True),
    ("2.5.3", "all penalties together", {"repetition_penalty": 1.3, "presence_penalty": -1.0,
                                         "no_repeat_ngram_size": 2}, True),
    ("2.5.1", "num_beams one and zero are greedy", {"num_beams": 1}, False),
    ("2.5.1", "num_return_sequences one", {"num_return_sequences": 1}, False),
    ("2.5.1", "length_penalty without beams", {"length_penalty": 2.0}, False),
    ("2.5.1", "input_len is ignored", {"input_len": 999}, False),
    ("2.5.1", "loop_context is ignored", {"loop_context": True}, False),
    ("2.5.1", "async is ignored", {"async": True}, False),
    ("2.5.1", "vocab_type without vocab", {"vocab_type": pb.VOCAB_TYPE_BPE}, False),
    ("2.5.1", "seed without do_sample", {"seed": 12345}, False),
    ("2.5.1", "eos_token_id without early_stopping", {"eos_token_id": 2, "early_stopping": False}, False),
)  # fmt: skip
for _spec, _name, _config, _differs in GREEDY:
    add(_spec, _name, tuple(C + f for f in _config), _greedy_row(_config, _differs))


def _drawn_row(config: dict[str, Any]) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        plain = s.generate(PROMPT, new=NEW)
        drawn = [s.generate(PROMPT, new=NEW, do_sample=True, seed=seed, **config) for seed in range(1, 5)]
        for tokens in drawn:
            oracle.check_drawn(s.reference_path, PROMPT, tokens, **config)
        assert any(tokens != plain for tokens in drawn), "something was drawn"

    return run


for _name, _config in (
    ("top_k keeps the k best", {"temperature": 1.0, "top_k": 3}),
    ("top_p keeps the nucleus", {"temperature": 1.0, "top_p": 0.6}),
    ("top_k then top_p", {"temperature": 1.0, "top_k": 5, "top_p": 0.7}),
    ("top_p follows temperature", {"top_p": 0.6, "temperature": 1.5}),
    ("penalties before selection", {"temperature": 1.0, "top_k": 2, "repetition_penalty": 1.5}),
):
    add("2.5.4", _name, (C + "do_sample", C + "seed", *(C + f for f in _config)), _drawn_row(_config))


@case("2.5.4", C + "seed", C + "do_sample", C + "temperature")
def a_seed_decides_the_tokens(s: Server) -> None:
    def draw(seed: int) -> list[int]:
        return s.generate(PROMPT, new=NEW, do_sample=True, temperature=1.5, seed=seed)

    seeds = (0, 1, 2**31, -1, 2**62)
    drawn = [draw(seed) for seed in seeds]
    assert [draw(seed) for seed in seeds] == drawn
    assert len({tuple(tokens) for tokens in drawn}) == len(seeds)


@case("2.5.4", C + "temperature", C + "do_sample")
def a_low_temperature_is_nearly_greedy_and_a_high_one_is_not(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    assert s.generate(PROMPT, new=NEW, do_sample=True, temperature=1e-4, seed=1) == plain
    hot = s.generate(PROMPT, new=NEW, do_sample=True, temperature=50.0, seed=1)
    assert sum(a == b for a, b in zip(hot, plain, strict=True)) < NEW // 2


@case("2.5.1", C + "top_k")
def top_k_larger_than_the_vocabulary_is_the_vocabulary(s: Server) -> None:
    config = {"new": NEW, "do_sample": True, "temperature": 1.0, "seed": 3}
    assert s.generate(PROMPT, top_k=0, **config) == s.generate(PROMPT, top_k=1 << 30, **config)


@case("2.5.1", C + "top_p")
def top_p_zero_and_one_are_off(s: Server) -> None:
    config = {"new": NEW, "do_sample": True, "temperature": 1.0, "seed": 3}
    assert s.generate(PROMPT, top_p=0.0, **config) == s.generate(PROMPT, top_p=1.0, **config)


@case("2.5.3", C + "bad_words_ids", "BadWordIds.ids", "BadWordIds.Array.word")
def bad_words_are_never_completed(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    words = [[plain[0]], plain[2:4], [PROMPT[-1], plain[1]], []]
    tokens = s.generate(PROMPT, new=NEW, bad_words_ids=words)
    oracle.check_greedy(s.reference_path, PROMPT, tokens, bad_words_ids=[w for w in words if w])
    assert plain[0] not in tokens


@case("2.5.3", C + "min_length", C + "eos_token_id", C + "early_stopping")
def min_length_forbids_eos_and_counts_the_prompt(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    config = {"eos_token_id": plain[1], "early_stopping": True, "min_length": len(PROMPT) + 8}
    tokens = s.generate(PROMPT, new=NEW, **config)
    assert plain[1] not in tokens[:8]
    oracle.check_greedy(s.reference_path, PROMPT, tokens, **config)
    assert s.generate(PROMPT, new=NEW, **(config | {"min_length": -5})) == plain[:2]


@case("2.5.6", C + "eos_token_id", C + "early_stopping")
def early_stopping_ends_at_eos_and_delivers_it(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    end = plain.index(plain[5]) + 1
    assert s.generate(PROMPT, new=NEW, eos_token_id=plain[5], early_stopping=True) == plain[:end]
    assert s.generate(PROMPT, new=NEW, eos_token_id=plain[5], early_stopping=False) == plain
    assert s.generate(PROMPT, new=NEW, eos_token_id=-1, early_stopping=True) == plain


@case("2.5.6", C + "stop_words_ids", "StopWordIds.ids", "StopWordIds.Array.word")
def stop_words_end_the_request_and_are_delivered(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    pair = plain[3:5]
    end = next(i + 2 for i in range(NEW) if plain[i : i + 2] == pair)
    live = s.start(PROMPT, new=NEW, stop_words_ids=[[], pair, [1, 1, 1]])
    assert live.sync() == OK
    assert live.finish_reason() == "stop_words"
    assert live.take_all() == plain[:end]


@case("2.5.6", C + "stop_words_ids")
def stop_words_may_reach_into_the_prompt(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    assert s.generate(PROMPT, new=NEW, stop_words_ids=[[*PROMPT[-2:], plain[0]]]) == plain[:1]
    assert s.generate(PROMPT, new=NEW, stop_words_ids=[PROMPT[-2:]]) == plain, "not in the prompt alone"


@case("2.5.6", C + "max_length", C + "eos_token_id")
def max_length_comes_before_eos(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    new = plain.index(plain[5]) + 1
    live = s.start(PROMPT, new=new, eos_token_id=plain[5], early_stopping=True)
    assert live.sync() == OK
    assert live.finish_reason() == "length"
    assert live.take_all() == plain[:new]


def _chunks(live: Any) -> list[int]:
    sizes = []
    while n := len(live.get().ids_from_generate):
        sizes.append(n)
    assert live.release() == OK
    return sizes


@case("D", C + "async_token_num", C + "first_token_num", "GeneratedElements.ids_from_generate")
def tokens_are_published_in_batches(s: Server) -> None:
    sizes = _chunks(s.start(PROMPT, new=64, first_token_num=5, async_token_num=20))
    assert sizes[0] >= 5 and sum(sizes) == 64
    assert all(n >= 20 for n in sizes[1:-1])


@case("D", C + "async_token_num", C + "first_token_num")
def fewer_tokens_than_a_batch_are_flushed_at_the_end(s: Server) -> None:
    assert _chunks(s.start(PROMPT, new=7, first_token_num=100, async_token_num=100)) == [7]


@case("D", C + "probe_only")
def probe_only_finishes_without_tokens(s: Server) -> None:
    live = s.start(PROMPT, probe_only=True)
    assert live.sync() == OK
    assert (live.status(), live.length(), live.drain()) == (FINISHED, 0, [])
    assert live.release() == OK


@case("2.5.8", C + "eos_token_id", C + "stop_words_ids", C + "do_sample", C + "top_k")
def what_upstreams_Python_client_sends(s: Server) -> None:
    plain = s.generate(PROMPT, new=NEW)
    eos = plain[6]
    tokens = s.generate(
        PROMPT, max_length=256, do_sample=True, early_stopping=True, top_k=1, top_p=1.0, temperature=1.0,
        repetition_penalty=1.0, length_penalty=1.0, eos_token_id=eos, stop_words_ids=[[eos], [1]],
        num_beams=1, num_return_sequences=1, seed=77,
    )  # fmt: skip
    assert tokens == plain[: plain.index(eos) + 1]


@case("9 #11", *(C + f for f in ("repetition_penalty", "max_length", "top_k", "top_p", "temperature",
                                 "early_stopping", "num_beams")))  # fmt: skip
def wire_zeros(s: Server) -> None:
    with s.model(engine_max_length=40) as name:
        message = request(name, PROMPT)
        message.config.CopyFrom(pb.GenerateConfig(uuid=message.config.uuid, do_sample=True))
        tokens = s.submit(message).take_all()
        assert len(tokens) == 40 - len(PROMPT), "eos 0 is not obeyed without early_stopping"
        oracle.check_greedy(s.reference_path, PROMPT, tokens)
