"""A short schedule of every kind of fault against a fleet of processes; `make chaos` runs a long one."""

from dataclasses import replace
from itertools import count
from xml.etree import ElementTree

import pytest

from tests.chaos import report
from tests.chaos.load import Story
from tests.chaos.recovery import Period, Sample, recoveries
from tests.chaos.run import Options, Outcome, run
from tests.chaos.schedule import WEIGHTS, Fault, plan
from tests.chaos.scripted import ask

SEED = 20_261_201
SHORT = Options(
    SEED, len(WEIGHTS), workers=2, brokers=2, gateways=2, clients=8, longest_pause_s=6.0, worker_timeout_s=4.0
)


DEEP = replace(SHORT, faults=3, brokers=1, gateways=1, clients=6, longest_pause_s=7.0, engine="real")


def first_seed(*names: str) -> int:
    """The first seed whose schedule begins with these faults."""
    sizes = dict.fromkeys((kind for kind, _ in WEIGHTS), 1)
    return next(s for s in count(1) if [f.name for f in plan(s, len(names), sizes, 1.0)] == list(names))


@pytest.mark.slow
def test_every_request_survives_every_kind_of_fault() -> None:
    outcome = run(SHORT)
    assert not outcome.complaints, "\n".join([f"repeat it with: {SHORT.replay}", *outcome.complaints])
    assert {(fault.kind, fault.action) for fault, _ in outcome.hits} == set(WEIGHTS)
    assert len(outcome.stories) > SHORT.clients
    assert outcome.reasons()["length"] > len(outcome.stories) / 2


@pytest.mark.slow
def test_every_kind_of_request_to_the_real_engine_survives_kills_and_a_pause() -> None:
    options = replace(DEEP, seed=first_seed("worker kill", "broker kill", "worker pause"))
    outcome = run(options)
    assert not outcome.complaints, "\n".join([f"repeat it with: {options.replay}", *outcome.complaints])
    assert len(outcome.hits) == options.faults
    assert len(outcome.stories) > options.clients


def test_schedule_is_a_function_of_its_seed() -> None:
    sizes = dict.fromkeys((kind for kind, _ in WEIGHTS), 2)
    assert plan(1, 200, sizes, 8.0) == plan(1, 200, sizes, 8.0) != plan(2, 200, sizes, 8.0)
    assert {(f.kind, f.action) for f in plan(1, len(WEIGHTS), sizes, 8.0)} == set(WEIGHTS)
    assert [ask(1, i) for i in range(50)] == [ask(1, i) for i in range(50)] != [ask(2, i) for i in range(50)]
    assert replace(SHORT, seed=5).replay.startswith("python -m tests.chaos --seed 5 --faults 17 ")


def test_recovery_lasts_until_a_token_that_was_not_there_yet_and_is_told_apart_from_other_faults() -> None:
    kill, upgrade = Fault(0, "worker", "kill", 0), Fault(0, "broker", "upgrade", 0)
    story = Story(
        0, ask(1, 0), events=[9.0, 10.1, 11.5, 25.5, 30.0, 32.0], lengths=[0, 2, 3, 3, 3, 3], ended_at=32.0
    )
    periods = [Period(kill, 10.0, 12.0), Period(upgrade, 20.0, 24.0), Period(kill, 26.0, 27.0)]
    periods += [Period(upgrade, 29.5, 30.5)]
    samples = [Sample(10.0, story, 2), Sample(26.0, story, 3), Sample(40.0, story, 3)]
    found = [(r.seconds, r.excess_s, r.is_alone) for r in recoveries(samples, periods)]
    assert found == [(1.5, 1.5, True), (6.0, 5.0, False)]
    late = Outcome(SHORT, samples=samples[1:2], periods=[periods[2]], stories=[story])
    assert report.is_slow(late) and ", and is not" in report.markdown(late)
    late.periods.append(periods[3])
    assert report.is_slow(late), "a fault that comes after the limit is no excuse"
    story.events[3] = 24.5
    assert not report.is_slow(late), "it was waiting already"


def test_a_quarantine_is_wrong_if_a_worker_that_is_said_to_have_died_was_only_cut_off() -> None:
    stories = [
        Story(i, ask(1, i), finish_reason=reason, dead_workers=("a", dead))
        for i, (reason, dead) in enumerate([("poison", "b"), ("poison", "c"), ("length", "c")])
    ]
    outcome = Outcome(SHORT, stories=stories, killed={"a", "b"})
    assert outcome.num_wronged() == 1 and "had not been killed: 1." in report.markdown(outcome)


def test_wait_is_charged_to_the_fault_that_explains_it() -> None:
    kill, pause = Fault(0, "worker", "kill", 0), Fault(0, "store", "pause", 0, 1.0)
    story = Story(0, ask(1, 0), events=[9.0, 10.5, 10.6, 13.0, 21.0, 24.0], lengths=[0] * 6)
    outcome = Outcome(SHORT, hits=[(pause, 20.0), (kill, 10.0)], stories=[story])
    # 10.6 to 13 comes after the kill; 13 to 21 holds the pause, of which one second lies after it.
    assert report.recoveries(outcome) == {"store pause": [3.0], "worker kill": [pytest.approx(2.4)]}
    assert "| worker kill | 1 | 2.40 | 2.40 | 2.40 | 2.40 |" in report.markdown(outcome)
    circles = ElementTree.fromstring(report.svg(report.recoveries(outcome))).iter(
        "{http://www.w3.org/2000/svg}circle"
    )
    assert len(list(circles)) == 2
