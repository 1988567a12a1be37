"""Estimates of waiting: rates of simulated queues, hints and their spread, denials for a deadline."""

import random

import numpy as np
import pytest
from allspark_broker.forecast import Outlook
from allspark_broker.queue import RequestQueue, Waiting
from allspark_broker.room import QueueFull, check_deadline, check_place
from allspark_broker.waits import MAX_FULL_MS, MAX_HINT_MS, MIN_HINT_MS, MIN_SEEN, Waits
from allspark_bus.errors import Denied
from allspark_bus.ledger import now_ms
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

MIDDLE = 0.5
"""A draw that leaves a hint at its estimate."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def observed(clock: Clock, gaps: list[float]) -> Waits:
    waits = Waits(clock, lambda: MIDDLE)
    waits.began()
    for gap in gaps:
        clock.now += gap
        waits.left()
    return waits


def envelope(deadline_in_ms: int = 0, prompt: int = 4, new: int = 10, priority: int = 0) -> fleet.Envelope:
    request = pb.StartRequestRequest(model_name="m")
    tensor = request.inputs.tensor_map["input_ids"]
    tensor.shape.dims[:] = [1, prompt]
    tensor.data_type = pb.INT64
    tensor.data = np.ones(prompt, "<i8").tobytes()
    request.config.uuid = "u"
    request.config.max_length = prompt + new
    deadline_ms = now_ms() + deadline_in_ms if deadline_in_ms else 0
    return fleet.Envelope(tenant="t", start_request=request, deadline_unix_ms=deadline_ms, priority=priority)


def queue_of(count: int, bound: int = 1000, priority: int = 0) -> RequestQueue:
    queue = RequestQueue(bound)
    for n in range(count):
        queue.push(Waiting(f"t/r{n}", 1, priority, n))
    return queue


def test_nothing_is_estimated_before_enough_was_seen() -> None:
    waits = observed(Clock(), [0.1] * (MIN_SEEN - 1))
    assert (waits.interval_s(), waits.full_for_ms()) == (0, 0)
    assert waits.hint_ms(50) == 1000


@pytest.mark.parametrize("batch", [1, 8])
def test_the_rate_is_that_of_the_departures_even_in_batches(batch: int) -> None:
    """Whole batches leave at once, 20 departures a second on average."""
    waits = observed(Clock(), ([0.0] * (batch - 1) + [0.05 * batch]) * (400 // batch))
    assert waits.interval_s() == pytest.approx(0.05, rel=0.1)
    assert waits.hint_ms(100) == pytest.approx(2500, rel=0.1), "half of the queue has left by then"


def test_an_idle_time_between_two_queues_is_no_interval() -> None:
    clock = Clock()
    waits = observed(clock, [0.01] * 64)
    clock.now += 3600
    waits.began()
    assert waits.interval_s() == pytest.approx(0.01)


def test_the_estimate_grows_while_nothing_departs() -> None:
    clock = Clock()
    waits = observed(clock, [0.01] * 64)
    clock.now += 65
    assert waits.interval_s() > 1.0


def test_hints_are_spread_and_bounded() -> None:
    clock = Clock()
    waits = Waits(clock, random.Random(7).random)
    for seconds in (1e-6, 0.4, 1e6):
        hints = {waits.hint_of_s(seconds) for _ in range(200)}
        assert len(hints) > 10
        assert min(hints) >= MIN_HINT_MS // 2 and max(hints) <= 1.5 * MAX_HINT_MS
    assert observed(clock, [10.0] * 20).full_for_ms() == MAX_FULL_MS
    assert observed(clock, [0.004] * 20).full_for_ms() == 4


def test_a_full_queue_denies_with_a_hint_and_promised_places_count() -> None:
    waits, queue = observed(Clock(), [0.02] * 64), queue_of(3, bound=4)
    check_place(envelope(), queue, waits)
    queue.promise("t")
    with pytest.raises(QueueFull) as raised:
        check_place(envelope(), queue, waits)
    assert (raised.value.retry_after_ms, raised.value.full_for_ms) == (MIN_HINT_MS, 20)


def test_a_deadline_that_cannot_be_kept_is_denied_and_no_other() -> None:
    waits = observed(Clock(), [0.1] * 64)
    with pytest.raises(Denied, match=r"5\.0 s after its deadline: 100 requests") as raised:
        check_deadline(envelope(5_000), Outlook(100, 9.99), waits)
    assert 4_900 < raised.value.retry_after_ms < 5_100
    check_deadline(envelope(20_000), Outlook(100, 9.99), waits)
    check_deadline(envelope(50), Outlook(0, 0.0), waits)
    with pytest.raises(Denied, match="not known yet") as raised:
        check_deadline(envelope(3_600_000), Outlook(1, None), waits)
    assert raised.value.retry_after_ms > 0


def test_bodies_beyond_the_bound_do_not_stay_and_the_books_balance() -> None:
    queue = RequestQueue(1000, max_body_bytes=100)
    for n in range(10):
        body = b"x" * 30
        queue.push(Waiting(f"t/r{n}", 1, 0, n, body=body if queue.may_keep(len(body)) else b""))
        queue.check()
    assert queue.body_bytes == 90
    for n in range(9, -1, -1):
        queue.remove(f"t/r{n}")
        queue.check()
    assert (queue.body_bytes, len(queue)) == (0, 0)


def test_removed_requests_do_not_pile_up_behind_one_that_waits() -> None:
    queue = RequestQueue(10)
    queue.push(Waiting("t/first", 1, 1, 0))
    for n in range(5_000):
        queue.push(Waiting(f"t/r{n}", 1, 0, n, body=b"x"))
        queue.remove(f"t/r{n}")
        queue.check()
