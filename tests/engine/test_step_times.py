"""Times of steps as a function of what they compute, and what an engine tells of itself."""

import pytest
from allspark_workers.engine.step_times import StepTimes


def measured(times: StepTimes, steps: list[tuple[int, int, float]], passed: float = 1.0) -> StepTimes:
    """Steps of (rows, prompt tokens, seconds) in a row; each of the tokens puts `passed` behind it."""
    now_s = 50.0
    times.idle()
    times.begin(now_s)
    for rows, computed, seconds in steps:
        now_s += seconds
        times.step(rows, computed, int(passed * computed), now_s)
    return times


def test_nothing_is_known_before_the_first_step() -> None:
    times = StepTimes()
    times.step(4, 0, 0, 1.0)  # nobody said when it began
    assert times.step_s(4) == times.prompt_token_s() == 0.0


def test_a_size_that_was_seen_is_told_and_others_are_bounded_by_it() -> None:
    times = measured(StepTimes(), [(4, 0, 0.02)])
    assert times.step_s(4) == pytest.approx(0.02)
    assert times.step_s(16) == pytest.approx(0.08), "no more than in proportion"
    assert times.step_s(1) == pytest.approx(0.02), "no more than a larger one"
    measured(times, [(16, 0, 0.03)])
    assert times.step_s(16) == pytest.approx(0.03)
    assert times.step_s(8) == pytest.approx(0.03)
    assert times.step_s(5) == pytest.approx(0.025)
    assert times.step_s(64) == pytest.approx(0.12)


def test_what_a_step_takes_beyond_its_rows_is_the_prompts() -> None:
    times = measured(StepTimes(), [(8, 0, 0.02)] * 5 + [(8, 500, 0.52)] * 200)
    assert times.step_s(8) == pytest.approx(0.02)
    assert times.prompt_token_s() == pytest.approx(0.001)


def test_prompt_tokens_from_a_cache_make_the_others_cheaper() -> None:
    """A quarter was computed: a token of a prompt costs a quarter on average."""
    times = measured(StepTimes(), [(0, 100, 0.1)] * 50, passed=4.0)
    assert times.prompt_token_s() == pytest.approx(0.00025)


def test_idle_time_is_no_step_and_what_is_between_two_steps_is() -> None:
    times = measured(StepTimes(), [(1, 0, 0.01)])
    times.idle()
    times.begin(1000.0)
    times.begin(1000.005)  # the one after it: only the first counts
    times.step(1, 0, 0, 1000.01)
    assert times.step_s(1) == pytest.approx(0.01)


def test_a_mean_follows_when_steps_become_slower() -> None:
    times = measured(StepTimes(), [(2, 0, 0.01)] * 100 + [(2, 0, 0.05)] * 64)
    assert times.step_s(2) > 0.045
