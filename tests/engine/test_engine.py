"""Life of requests in an engine: cancel, hold, deadline, failure, memory, statistics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from allspark_workers.engine import runner
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import ModelMemoryError
from allspark_workers.engine.step_plan import Row
from allspark_workers.engine.types import FinishReason, StepOutput
from engine_helpers import VOCAB, Collected, random_prompt, request, run_all

Maker = Callable[..., Engine]


class Clock:
    """Monotonic seconds that move only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def steps(engine: Engine, count: int, into: Collected | None = None) -> Collected:
    into = into or Collected()
    for _ in range(count):
        into.add(engine.step())
    return into


def test_an_idle_engine_does_nothing(make_engine: Maker) -> None:
    engine = make_engine()
    assert not engine.has_work()
    assert engine.step() == []
    assert not engine.wait_for_work(0.0)
    assert engine.stat().steps == 0


@pytest.mark.parametrize("moment", ["inbox", "waiting", "prefill", "decode", "held"])
def test_cancel_frees_everything_at_each_stage(moment: str, make_engine: Maker) -> None:
    engine = make_engine(prefill_chunk=8, max_batch=1)
    if moment == "waiting":
        engine.submit(request("front", random_prompt(40), 30))
    engine.submit(request("a", random_prompt(40), 30))
    collected = steps(engine, {"inbox": 0, "waiting": 2, "prefill": 2, "decode": 8, "held": 8}[moment])
    if moment == "held":
        engine.hold("a")
        steps(engine, 1, collected)
    generated = len(collected.tokens.get("a", []))
    assert (generated > 0) == (moment in ("decode", "held"))
    engine.cancel("a")
    last = [out for out in engine.step() if out.request_id == "a"]
    assert last == [StepOutput("a", 1, generated, [], FinishReason.STOPPED)]
    engine.cancel("front")
    engine.step()
    engine.check()
    assert engine.stat().used_span == 0 and not engine.has_work()


def test_a_token_computed_during_cancel_is_dropped(
    make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.submit(request("a", random_prompt(5), 30))
    run = engine._runner.run

    def cancel_meanwhile(*args: Any) -> list[int]:
        engine.cancel("a")
        return run(*args)

    monkeypatch.setattr(engine._runner, "run", cancel_meanwhile)
    assert engine.step() == [StepOutput("a", 1, 0, [], FinishReason.STOPPED)]


def test_cancelling_the_unknown_and_the_ended_is_harmless(make_engine: Maker) -> None:
    engine = make_engine()
    engine.cancel("never")
    assert not engine.has_work()
    run_all(engine, [request("a", [5], 2)])
    for command in (engine.cancel, engine.hold, engine.resume):
        command("a")
    assert not engine.has_work()


def test_hold_and_resume_do_not_change_the_tokens(make_engine: Maker) -> None:
    engine = make_engine()
    wanted = request("a", random_prompt(20), 20, do_sample=True, seed=5)
    quiet = run_all(engine, [wanted]).tokens["a"]
    engine.submit(wanted)
    collected = steps(engine, 6)
    engine.hold("a")
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work(), "a held request is no work"
    assert engine.step() == []
    engine.resume("a")
    assert engine.has_work()
    steps(engine, 14, collected)
    assert collected.tokens["a"] == quiet and collected.finish("a") == "length"


def test_a_deadline_ends_running_waiting_and_held_requests(make_engine: Maker) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_batch=2)
    for name in ("running", "held", "waiting"):
        engine.submit(request(name, random_prompt(5), 50, deadline_s=1001.0, arrival_s=len(name)))
    engine.submit(request("free", random_prompt(5), 3, arrival_s=99.0))
    collected = steps(engine, 3)
    engine.hold("held")
    steps(engine, 1, collected)
    clock.now_s = 1001.5
    steps(engine, 1, collected)
    assert {collected.finish(name) for name in ("running", "held", "waiting")} == {"deadline"}
    assert "0.500 s ago" in collected.ends["waiting"].message
    steps(engine, 3, collected)
    assert collected.finish("free") == "length"


def test_waiting_wakes_for_a_command_and_for_a_deadline(make_engine: Maker) -> None:
    engine = make_engine()
    timer = threading.Timer(0.05, engine.submit, [request("a", [5], 1)])
    timer.start()
    assert engine.wait_for_work(30.0)
    timer.join()
    engine.hold("a")
    engine.step()
    assert not engine.has_work()
    engine.cancel("a")
    engine.step()
    deadline_s = engine._clock() + 0.05
    engine.submit(request("b", [5], 1, deadline_s=deadline_s))
    engine.hold("b")
    engine.step()
    assert engine.wait_for_work(30.0), "the deadline is work"
    assert [out.finish for out in engine.step()] == [FinishReason.DEADLINE]


@pytest.mark.parametrize("poison_at", [0, 9, 12])
def test_a_request_that_raises_fails_alone(
    poison_at: int, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its prefill and while decoding; its neighbours' tokens and penalties are as in a quiet run."""
    engine = make_engine()
    good = [request(f"g{i}", random_prompt(6 + i), 12, repetition_penalty=1.3) for i in range(3)]
    expected = run_all(engine, good).tokens
    run = engine._runner._run

    def explode(rows: list[Row], is_profiled: bool) -> list[int]:
        tokens = run(rows, is_profiled)
        if any(row.sequence.request_id == "poison" and row.start == poison_at for row in rows):
            raise RuntimeError("made up")
        return tokens

    monkeypatch.setattr(engine._runner, "_run", explode)
    got = run_all(engine, [good[0], request("poison", [7] * 9, 12), *good[1:]])
    assert got.finish("poison") == "error"
    assert got.ends["poison"].message == "RuntimeError: made up"
    assert len(got.tokens["poison"]) == max(0, poison_at - 8)
    assert {name: got.tokens[name] for name in expected} == expected


def test_logits_without_a_finite_value_end_the_request(
    make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    forward = engine._model.decoder.forward
    monkeypatch.setattr(engine._model.decoder, "forward", lambda *args: forward(*args).fill_(float("nan")))
    got = run_all(engine, [request("a", [5, 6], 4)])
    assert got.finish("a") == "error" and "no finite logit" in got.ends["a"].message


def test_a_prompt_that_can_never_fit_ends_and_blocks_nobody(make_engine: Maker) -> None:
    probe = make_engine().facts
    span_bytes = 2 * probe.num_layers * probe.span_bytes
    engine = make_engine(kv_bytes=3 * span_bytes)
    assert engine.facts.max_length == 96
    giant = request("giant", random_prompt(97), 5)
    grows = request("grows", random_prompt(90), 50, arrival_s=1.0)
    small = request("small", random_prompt(4), 3, arrival_s=2.0)
    got = run_all(engine, [giant, grows, small])
    assert got.finish("giant") == got.finish("grows") == "cache_memory"
    assert "whole pool has 3" in got.ends["giant"].message
    assert len(got.tokens["grows"]) == 7 and got.finish("small") == "length"


def test_a_pool_without_a_span_is_refused(make_engine: Maker) -> None:
    with pytest.raises(ModelMemoryError, match="do not hold one span"):
        make_engine(kv_bytes=100)


def test_more_requests_than_slots_all_end(make_engine: Maker) -> None:
    engine = make_engine(max_batch=3)
    got = run_all(engine, [request(f"r{i}", random_prompt(3 + i), 4) for i in range(20)])
    assert len(got.ends) == 20 and all(len(tokens) == 4 for tokens in got.tokens.values())


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("non-empty", {"prompt": []}),
    ("prompt id", {"prompt": [5, -1]}),
    ("prompt id", {"prompt": [VOCAB]}),
    ("generated id", {"generated": [VOCAB]}),
    ("leaves no room", {"max_length": 2}),
    ("exceeds the limit", {"max_length": 641}),
    ("more tokens", {"generated": [5, 5], "max_length": 3}),
    ("eos or bad-word", {"eos_token_id": VOCAB}),
    ("eos or bad-word", {"bad_words": ((1, -4),)}),
    ("out of range", {"repetition_penalty": 0.0}),
    ("64 bits", {"seed": 2**63}),
]


@pytest.mark.parametrize(("reason", "fields"), IMPOSSIBLE)
def test_impossible_requests_are_refused_at_once(
    reason: str, fields: dict[str, Any], make_engine: Maker
) -> None:
    engine = make_engine()
    fields = {"prompt": [5, 6]} | fields
    with pytest.raises(ValueError, match=reason):
        engine.submit(request("bad", **fields))
    assert not engine.has_work()
    assert run_all(engine, [request("bad", [5], 1)]).finish("bad") == "length", "the id is still free"


def test_a_wrong_prompt_array_is_refused(make_engine: Maker) -> None:
    bad = request("bad", [5, 6])
    bad.prompt = np.asarray([[5, 6]], np.int64)
    with pytest.raises(ValueError, match="int64 vector"):
        make_engine().submit(bad)


def test_a_live_id_is_refused_and_a_newer_epoch_replaces_it(make_engine: Maker) -> None:
    engine = make_engine()
    engine.submit(request("a", random_prompt(5), 30, epoch=3))
    first = engine.step()
    with pytest.raises(ValueError, match="already live"):
        engine.submit(request("a", random_prompt(5), 30, epoch=3))
    engine.submit(request("a", random_prompt(5), 3, epoch=4, generated=first[0].tokens))
    outputs = engine.step()
    assert outputs[0] == StepOutput("a", 3, 1, [], FinishReason.STOPPED)
    assert (outputs[1].epoch, outputs[1].position) == (4, 1)
    engine.step()
    assert not engine.has_work()


def test_a_resumed_request_that_was_complete_ends_without_tokens(make_engine: Maker) -> None:
    engine = make_engine()
    done = request("a", [5], 9, generated=[8, 9], eos_token_id=9, early_stopping=True)
    full = request("b", [5], 2, generated=[8, 9])
    got = run_all(engine, [done, full])
    assert got.ends["a"] == StepOutput("a", 1, 2, [], FinishReason.EOS)
    assert got.ends["b"] == StepOutput("b", 1, 2, [], FinishReason.LENGTH)


def test_statistics_are_real(make_engine: Maker) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, span_size=16, max_batch=2, prefill_chunk=32)
    facts = engine.facts
    idle = engine.stat()
    assert idle.total_span == idle.free_span and idle.span_size == facts.span_bytes == 16 * 2 * 16 * 4
    assert (idle.total_generated_token, idle.total_prefill_token) == (0, 0), "warm-up is not counted"
    for name in ("a", "b", "c"):
        engine.submit(request(name, random_prompt(20), 10))
    assert engine.stat().pending_request == 3
    engine.step()
    stat = engine.stat()
    assert (stat.running_request, stat.pending_request) == (2, 1)
    assert stat.used_span == 2 * 2 * facts.num_layers * 2
    assert stat.free_token == stat.free_span // (2 * facts.num_layers) * 16
    assert (stat.total_generated_token, stat.total_prefill_token) == (1, 32)
    assert stat.used_device_memory_pool_size == facts.weight_bytes + stat.used_span * stat.span_size
    clock.now_s += 2.0
    run_all(engine, [])
    stat = engine.stat()
    assert (stat.total_generated_token, stat.total_prefill_token) == (30, 60)
    assert stat.generate_token_persec == 15.0 and stat.process_token_persec == 30.0
    assert stat.used_span == 0 and stat.last_step_s == 1002.0 and stat.steps > 10


def test_what_requests_have_left_and_how_long_steps_take_is_told(make_engine: Maker) -> None:
    engine = make_engine(span_size=16, max_batch=2, prefill_chunk=32)
    idle = engine.stat()
    assert (idle.full_step_s, idle.prompt_token_s, idle.prompt_left, idle.output_left) == (0, 0, 0, 0)
    for name in ("a", "b", "c"):
        engine.submit(request(name, random_prompt(20), 10))
    engine.submit(request("pair", random_prompt(8), 10, num_beams=2))
    assert (engine.stat().prompt_left, engine.stat().output_left) == (68, 50)
    engine.step()  # a with its first token, and twelve tokens of b
    assert (engine.stat().prompt_left, engine.stat().output_left) == (36, 49)
    assert engine.stat().prompt_token_s > 0
    engine.step()
    assert engine.stat().full_step_s == 0, "no step has only decoded"
    engine.step()
    assert engine.stat().full_step_s == engine.stat().next_step_s > 0
    run_all(engine, [])
    assert (engine.stat().prompt_left, engine.stat().output_left) == (0, 0)


def test_recomputed_prompts_are_counted_once(make_engine: Maker) -> None:
    engine = make_engine()
    engine.submit(request("a", random_prompt(20), 5))
    engine.step()
    engine._scheduler.preempt(engine._scheduler.running[0])
    run_all(engine, [])
    assert engine.stat().total_prefill_token == 20


def test_profiling_measures_only_while_enabled(make_engine: Maker) -> None:
    engine = make_engine()
    quiet = run_all(engine, [request("a", random_prompt(9), 5)]).tokens["a"]
    assert engine.profile() == ""
    engine.profile_enabled = True
    assert run_all(engine, [request("a", random_prompt(9), 5)]).tokens["a"] == quiet
    engine.profile_enabled = False
    text = engine.profile(reset=False)
    assert text.index("* prefill worker") < text.index("* decode worker")
    decode = text[text.index("* decode worker") :]
    counts = {line.split()[1]: int(line.split()[2]) for line in decode.splitlines() if line[:1] == "0"}
    layers = engine.facts.num_layers
    assert counts["Linear"] == 4 * 4 * layers and counts["PagedAttention"] == 4 * layers
    assert counts["LmHead"] == counts["Sample"] == counts["Schedule"] == counts["BuildBatch"] == 4
    assert engine.profile() == text
    assert engine.profile() == ""


def test_stop_and_start_again(make_engine: Maker) -> None:
    engine = make_engine()
    expected = run_all(engine, [request("a", random_prompt(9), 5)]).tokens
    engine.submit(request("left", random_prompt(9), 50))
    engine.step()
    engine.stop()
    with pytest.raises(ValueError, match="not started"):
        engine.submit(request("b", [5], 1))
    with pytest.raises(RuntimeError, match="not started"):
        engine.step()
    assert not engine.has_work()
    engine.start()
    assert engine.stat().total_generated_token == 0
    assert run_all(engine, [request("a", random_prompt(9), 5)]).tokens == expected


def test_commands_from_many_threads(make_engine: Maker) -> None:
    """Eight clients submit, hold, resume and cancel while the engine steps: each request ends once."""
    engine = make_engine(max_batch=4)
    names = [f"{client}-{i}" for client in range(8) for i in range(6)]

    def client(number: int) -> None:
        for i in range(6):
            name = f"{number}-{i}"
            engine.submit(request(name, random_prompt(3 + i), 6))
            engine.hold(name)
            if i % 3 == 2:
                engine.cancel(name)
            engine.resume(name)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    collected = Collected()
    while any(thread.is_alive() for thread in threads) or engine.has_work():
        if engine.wait_for_work(0.01):
            collected.add(engine.step())
    for thread in threads:
        thread.join()
    assert sorted(collected.ends) == sorted(names)
    assert {collected.finish(n) for n in names if n[-1] not in "25"} == {"length"}
    assert engine.stat().used_span == 0


def test_a_lost_device_is_not_blamed_on_requests(make_engine: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator that is gone ends the engine loop: the worker leaves, its requests go elsewhere."""
    engine = make_engine()

    def fail(*args: Any) -> Any:
        raise RuntimeError("launch failed")

    def lost(device: Any) -> None:
        raise torch.AcceleratorError("illegal address")

    monkeypatch.setattr(engine._model.decoder, "forward", fail)
    monkeypatch.setattr(runner, "check_health", lost)
    engine.submit(request("a", [5], 2))
    with pytest.raises(torch.AcceleratorError):
        engine.step()
    engine.cancel("a")
    assert [out.finish for out in engine.step()] == [FinishReason.STOPPED]
