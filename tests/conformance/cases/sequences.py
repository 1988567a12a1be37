"""Sections D and 2.5: several sequences of one request. Beams equal those of transformers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conformance import oracle
from tests.conformance.server import FINISHED, OK, Server, array_of
from tests.conformance.suite import add, case

C = "GenerateConfig."
PROMPT = [5, 9, 6, 5, 9, 7, 5]
NEW = 24
BEAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("num_beams 2", {"num_beams": 2}),
    ("num_beams 4", {"num_beams": 4}),
    ("num_beams 8", {"num_beams": 8}),
    ("length_penalty below zero", {"num_beams": 4, "length_penalty": -1.0}),
    ("length_penalty of two", {"num_beams": 4, "length_penalty": 2.0}),
    ("length_penalty of zero is no default", {"num_beams": 4, "length_penalty": 0.0}),
)


def _beam_row(config: dict[str, Any], early: bool) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        eos = s.generate(PROMPT, new=4)[2]
        options = {"length_penalty": 1.0} | config
        expected, scores = oracle.beams(
            s.reference_path, PROMPT, max_new_tokens=NEW, eos_token_id=eos, early_stopping=early,
            num_return_sequences=2, **options,
        )  # fmt: skip
        live = s.start(
            PROMPT, new=NEW, eos_token_id=eos, early_stopping=early, num_return_sequences=2, **options
        )
        sequences, found = _sequences(live, 2)
        assert found == pytest.approx(scores, abs=1e-3)
        assert sequences == [_until(tokens, eos) for tokens in expected]
        assert live.release() == OK

    return run


def _until(tokens: Sequence[int], eos: int) -> list[int]:
    return list(tokens[: tokens.index(eos) + 1]) if eos in tokens else list(tokens)


def _sequences(live: Any, count: int) -> tuple[list[list[int]], list[float]]:
    """All sequences of a request, and the scores of its beams."""
    element = live.elements()
    tensors = element.tensors_from_model_inference.tensor_map
    found = [list(element.ids_from_generate)]
    found += [array_of(tensors[f"sequence_{i}"]).reshape(-1).tolist() for i in range(1, count)]
    assert all(tensors[f"sequence_{i}"].data_type == pb.INT64 for i in range(1, count))
    assert live.status() == FINISHED
    scores = array_of(tensors["sequence_scores"]).reshape(-1).tolist() if "sequence_scores" in tensors else []
    return found, scores


for _name, _config in BEAMS:
    for _early in (False, True):
        add("D", f"{_name} early_stopping {_early}",
            (C + "early_stopping", C + "num_return_sequences", *(C + f for f in _config)),
            _beam_row(_config, _early))  # fmt: skip


@case("D", C + "num_return_sequences", C + "seed")
def n_sampled_sequences(s: Server) -> None:
    live = s.start(PROMPT, new=NEW, do_sample=True, temperature=1.5, seed=11, num_return_sequences=3)
    sequences, scores = _sequences(live, 3)
    assert scores == []
    assert [len(tokens) for tokens in sequences] == [NEW] * 3
    assert len({tuple(tokens) for tokens in sequences}) == 3
    assert live.release() == OK
    again = s.start(PROMPT, new=NEW, do_sample=True, temperature=1.5, seed=11, num_return_sequences=3)
    assert _sequences(again, 3)[0] == sequences
    assert again.release() == OK


@case("D", C + "top_k_arr", C + "num_return_sequences")
def top_k_arr_overrides_top_k_for_each_sequence(s: Server) -> None:
    live = s.start(
        PROMPT, new=NEW, do_sample=True, temperature=1.5, seed=5, num_return_sequences=3, top_k_arr=[1, 0, 1]
    )
    sequences, _ = _sequences(live, 3)
    plain = s.generate(PROMPT, new=NEW)
    assert [tokens == plain for tokens in sequences] == [True, False, True]
    assert live.release() == OK


@case("D", C + "top_p_arr", C + "num_return_sequences")
def top_p_arr_overrides_top_p_for_each_sequence(s: Server) -> None:
    live = s.start(
        PROMPT,
        new=NEW,
        do_sample=True,
        temperature=1.5,
        seed=5,
        num_return_sequences=2,
        top_p_arr=[1e-6, 0.9],
    )
    sequences, _ = _sequences(live, 2)
    assert sequences[0] == s.generate(PROMPT, new=NEW)
    oracle.check_drawn(s.reference_path, PROMPT, sequences[1], temperature=1.5, top_p=0.9)
    assert live.release() == OK


@case("D", C + "seed_arr", C + "num_return_sequences")
def seed_arr_overrides_seed_for_each_sequence(s: Server) -> None:
    live = s.start(
        PROMPT, new=NEW, do_sample=True, temperature=1.5, num_return_sequences=3, seed_arr=[21, 22, 21]
    )
    sequences, _ = _sequences(live, 3)
    assert sequences[0] == s.generate(PROMPT, new=NEW, do_sample=True, temperature=1.5, seed=21)
    assert sequences[0] != sequences[1]
    assert live.release() == OK


@case("D", C + "top_k_arr", C + "top_p_arr", C + "seed_arr")
def arrays_of_one_element_are_for_the_one_sequence(s: Server) -> None:
    arrays = {"top_k_arr": [4], "top_p_arr": [0.8], "seed_arr": [9]}
    plain = s.generate(PROMPT, new=NEW, do_sample=True, temperature=1.0, top_k=4, top_p=0.8, seed=9)
    assert s.generate(PROMPT, new=NEW, do_sample=True, temperature=1.0, top_k=1, seed=1, **arrays) == plain
