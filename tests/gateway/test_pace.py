"""The spacing of answers: pure arithmetic on a clock that the test owns."""

from allspark_gateway.pace import Pace


def reading(num_streams: int, gather_s: float = 0.1, now_s: float = 100.0) -> Pace:
    pace = Pace(gather_s)
    for _ in range(num_streams):
        pace.enter(float("-inf"), now_s)
    return pace


def test_one_stream_of_ordinary_speed_gets_each_token_at_once() -> None:
    assert reading(1).pause_s(100.0, 100.021) <= 0, "21 ms after the last one"
    assert 0 < reading(1).pause_s(100.0, 100.001) <= 0.03, "a faster one a few at a time"


def test_many_streams_are_answered_in_common_ticks() -> None:
    pace = reading(16)
    due = {round(last + pause, 6) for last in (8.001, 8.01, 8.03) if (pause := pace.pause_s(last, last))}
    assert due == {8.08}


def test_a_tick_is_at_least_half_a_tick_away() -> None:
    pace = reading(16)
    for k in range(1000):
        last = 50 + k / 777
        assert 0.04 - 1e-9 <= pace.pause_s(last, last) <= 0.12 + 1e-9


def test_the_first_answer_and_one_that_is_overdue_do_not_wait() -> None:
    pace = reading(1000)
    assert pace.pause_s(float("-inf"), 100.0) <= 0
    assert pace.pause_s(99.8, 100.0) <= 0


def test_the_bound_holds_for_any_number_of_streams_and_zero_switches_it_off() -> None:
    assert reading(100_000).pause_s(100.0, 100.0) <= 0.15
    assert reading(100_000, gather_s=0).pause_s(100.0, 100.0) <= 0


def test_a_stream_counts_once_a_second_and_fades() -> None:
    pace = reading(1)
    for k in range(1, 100):
        pace.enter(100.0, 100.0 + k / 1000)
    assert pace.pause_s(100.1, 100.1) <= 0.03, "one stream that is read often is one stream"
    pace = reading(16)
    pace.enter(100.5, 101.2)
    assert pace.pause_s(101.2, 101.2) > 0.03, "the others were read a moment ago"
    pace.enter(101.2, 103.0)
    assert pace.pause_s(103.0, 103.0) <= 0.03, "they are not any more"
