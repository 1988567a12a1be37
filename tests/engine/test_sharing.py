"""Random crowds of requests of every kind on a simulated KV cache that knows what every slot must hold.

The engine and its scheduler are the real ones; in the place of the model stands a simulation. A slot holds
the checksum of the tokens up to it, so a row that would attend to anything else than its own history is
noticed at once, and so is every span that is written while others read it. What comes next is a function
of the history (and of the seed), so results can be predicted without an engine.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from allspark_workers.engine.beams import BeamSearch, Candidates
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.families import sequence_seed
from allspark_workers.engine.inference import HiddenStates
from allspark_workers.engine.scheduler import Scheduler
from allspark_workers.engine.step_plan import Row
from allspark_workers.engine.types import EngineRequest, FinishReason, StepOutput, Task
from engine_helpers import random_prompt, request

Maker = Callable[..., Engine]
SPAN, TOKENS = 16, 50
EOS = 7
SEEDS = (*range(11), 35)


def checksum(tokens: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, np.int64).tobytes())


def next_token(tokens: Any, seed: int) -> int:
    return (checksum(tokens) ^ zlib.crc32(b"%d" % seed)) % TOKENS


def candidates(tokens: Any, num_beams: int) -> Candidates:
    rng = np.random.default_rng(checksum(tokens))
    ids = rng.choice(TOKENS, 2 * num_beams, replace=False).astype(np.int64)
    log_probs = -np.sort(rng.exponential(1.0, 2 * num_beams)).astype(np.float32)
    return Candidates(ids, log_probs, log_probs)


class Simulation:
    """Stands in for the runner. `content[s, i]`: checksum of the tokens up to the one in slot i of span s."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._content = np.full((scheduler.ledger.total, SPAN), -1, np.int64)
        self.num_copies = 0

    def copy_spans(self, copies: dict[int, int]) -> None:
        self._content[list(copies)] = self._content[list(copies.values())]
        self.num_copies += len(copies)

    def forget(self, rows: list[Row]) -> None:
        """The engine would run each row alone: let the failure through."""
        raise

    def run(self, rows: list[Row], is_profiled: bool = False) -> list[Any]:
        ledger = self._scheduler.ledger
        for span in range(ledger.total):
            if ledger.num_holders(span) == 0 and not ledger.is_idle(span):
                self._content[span] = -2  # nobody may rely on it any more
        written: set[int] = set()
        for row in rows:
            seq = row.sequence
            for position in range(row.start):
                where = f"{seq.request_id} token {position} of {seq.length}"
                assert self._at(row, position) == checksum(seq.tokens[: position + 1]), where
        for row in rows:
            for position in range(row.start, row.start + row.count):
                span = int(self._scheduler.span_table[row.sequence.row, position // SPAN])
                assert span * SPAN + position % SPAN not in written, "two rows write to one slot"
                written.add(span * SPAN + position % SPAN)
                self._check_writer(row, span)
                self._content[span, position % SPAN] = checksum(row.sequence.tokens[: position + 1])
        return [self._result(row) for row in rows if row.samples]

    def _at(self, row: Row, position: int) -> int:
        span = self._scheduler.span_table[row.sequence.row, position // SPAN]
        return int(self._content[span, position % SPAN])

    def _check_writer(self, row: Row, span: int) -> None:
        """Who writes to a span that others hold must be the leader of a gang that waits for it."""
        holders = [seq for seq in self._scheduler.running if span in seq.spans]
        others = [seq for seq in holders if seq is not row.sequence]
        gang = row.sequence.gang
        assert row.sequence in holders
        for other in others:
            assert gang is not None and row.sequence is gang.leader
            assert other in gang.members and other.is_parked

    def _result(self, row: Row) -> Any:
        seq = row.sequence
        if seq.is_inference:
            ends = range(row.start + 1, row.start + row.count + 1)
            states = [[checksum(seq.tokens[:end]) % 1000] for end in ends]
            return HiddenStates(np.array(states, np.float32), np.array(states[-1], np.float32))
        assert row.start + row.count == seq.length
        if seq.gang is not None:
            return candidates(seq.tokens[: seq.length], seq.request.params.num_beams)
        return next_token(seq.tokens[: seq.length], seq.request.params.seed)


def predicted(item: EngineRequest) -> list[list[int]]:
    """All sequences that a request must give, without an engine."""
    params, prompt = item.params, item.prompt.tolist()
    if item.task is not Task.GENERATE:
        return [[]]
    if params.num_beams > 1:
        return predicted_beams(item)
    found = []
    for index in range(params.num_return_sequences):
        tokens = list(prompt)
        seed = sequence_seed(params.seed, index)
        while len(tokens) < params.max_length and (len(tokens) == len(prompt) or tokens[-1] != EOS):
            tokens.append(next_token(tokens, seed))
        found.append(tokens[len(prompt) :])
    return found


def predicted_beams(item: EngineRequest) -> list[list[int]]:
    params, prompt = item.params, item.prompt.tolist()
    search = BeamSearch(params.num_beams, params.length_penalty, params.early_stopping)
    beams: list[list[int]] = [[]]

    def tokens_of(parent: int) -> tuple[int, ...]:
        return tuple(beams[parent])

    def end_of(parent: int, token: int) -> FinishReason | None:
        is_full = len(prompt) + len(beams[parent]) + 1 >= params.max_length
        return FinishReason.LENGTH if is_full or token == EOS else None

    while True:
        found = [candidates(prompt + beam, params.num_beams) for beam in beams]
        picks = search.step(found, len(beams[0]), end_of, tokens_of)
        if picks is None:
            return [list(kept.tokens) for kept in search.hypotheses[: params.num_return_sequences]]
        beams = [[*beams[pick.parent], pick.token] for pick in picks]


def crowd(rng: random.Random, count: int) -> Iterator[EngineRequest]:
    """Requests of every kind; many begin alike."""
    for index in range(count):
        length = rng.choice([1, 15, 16, 17, 33, 48, rng.randint(1, 70)])
        prompt = (random_prompt(32, seed=rng.randrange(3)) + random_prompt(70, seed=index))[:length]
        kind = rng.choice(["plain", "samples", "samples", "beams", "beams", "probe", "infer"])
        several = rng.randint(2, 5)
        fields: dict[str, Any] = {"eos_token_id": EOS, "early_stopping": rng.random() < 0.7}
        if kind in ("plain", "samples"):
            fields |= {"early_stopping": True, "seed": index, "do_sample": True}
        if kind == "samples":
            fields["num_return_sequences"] = several
        if kind == "beams":
            fields |= {"num_beams": several, "num_return_sequences": rng.randint(1, several)}
        item = request(f"{kind} {index}", prompt, rng.randint(1, 40), priority=rng.randint(0, 1), **fields)
        if kind in ("probe", "infer"):
            item.task = Task(kind)
        yield item


@dataclass
class Result:
    tokens: list[int]
    end: StepOutput | None = None


def disturb(engine: Engine, rng: random.Random, held: list[str], cancelled: set[str]) -> None:
    scheduler = engine._scheduler
    live = [seq.request_id for seq in scheduler if not seq.request_id.startswith("#")]
    if not live:
        return
    chosen = rng.choice(live)
    action = rng.random()
    if action < 0.15:
        engine.hold(chosen)
        held.append(chosen)
    elif action < 0.3 and held:
        engine.resume(held.pop())
    elif action < 0.4 and scheduler.running:
        scheduler.preempt(rng.choice(scheduler.running))
    elif action < 0.43:
        engine.cancel(chosen)
        cancelled.add(chosen)


@pytest.mark.parametrize("has_cache", [False, True])
def test_whatever_happens_every_row_reads_its_own_history(has_cache: bool, make_engine: Maker) -> None:
    total_copies = total_preemptions = 0
    engine = make_engine(span_size=SPAN)
    span_bytes = 2 * engine.facts.num_layers * engine.facts.span_bytes
    for seed in SEEDS:
        rng = random.Random(seed)
        settings = {"max_batch": rng.choice([5, 8, 16]), "prefill_chunk": rng.choice([5, 16, 40, 200])}
        if has_cache:
            settings |= {"enable_prefix_cache": True, "prefix_cache_ttl_s": 1000.0}
        engine = make_engine(span_size=SPAN, kv_bytes=rng.choice([24, 30, 60]) * span_bytes, **settings)
        simulation = Simulation(engine._scheduler)
        engine._runner = simulation  # type: ignore[assignment]
        asked = {item.request_id: item for item in crowd(rng, 20)}
        waiting = list(asked.values())
        results = {key: Result([]) for key in asked}
        held: list[str] = []
        cancelled: set[str] = set()
        for _ in range(3000):
            if waiting and rng.random() < 0.3:
                engine.submit(replace(waiting.pop()))
            disturb(engine, rng, held, cancelled)
            if not waiting and not engine.has_work():
                if not held:
                    break
                engine.resume(held.pop())
            for out in engine.step():
                mine = results[out.request_id]
                assert mine.end is None and out.position == len(mine.tokens), f"seed {seed}"
                mine.tokens += out.tokens
                mine.end = out if out.finish is not None else None
            engine.check()
        total_copies += simulation.num_copies
        total_preemptions += engine._scheduler.num_preemptions
        assert engine._scheduler.ledger.used == 0
        for key, item in asked.items():
            check_result(results[key], item, key in cancelled, f"seed {seed}, {key}")
    assert total_copies > 100 and total_preemptions > 20


def check_result(result: Result, item: EngineRequest, is_cancelled: bool, what: str) -> None:
    end, want = result.end, predicted(item)
    assert end is not None, what
    if is_cancelled and end.finish is FinishReason.STOPPED:
        assert result.tokens == want[0][: len(result.tokens)], what
        return
    if end.finish is FinishReason.CACHE_MEMORY:
        assert item.params.num_beams > 1, what
        return
    others = [end.tensors[f"sequence_{i}"].tolist() for i in range(1, len(want))]
    assert [result.tokens, *others] == want, what
    if item.task is Task.INFER:
        ends = range(1, len(item.prompt) + 1)
        states = [checksum(item.prompt[:end]) % 1000 for end in ends]
        assert end.tensors["last_hidden_state"][0, :, 0].tolist() == states, what
