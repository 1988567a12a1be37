"""``allspark bench overload``: its figures from known samples, and a fleet under many times its load."""

import json
import os
import sys
from pathlib import Path

import pytest
from allspark.cli.bench_overload import Overload, measure, recovery_s, row_of, sustainable
from allspark.cli.errors import CommandError
from allspark.cli.memory_watch import Memory, resident_mib
from allspark.cli.open_loop import Plan, Sample
from allspark.client import ModelOptions
from allspark.launcher import Fleet, FleetOptions
from allspark_proto import allspark_service_pb2 as pb

SCRIPTED = str(Path(__file__).parents[1] / "fleet" / "scripted_engine.py")
OVERLOAD = Overload(
    model="m", times=30, seconds=1, deadline_s=60, prompt_tokens=8, new_tokens=8, seed=1, processes=2,
    burst=30, calm_s=0.5,
)  # fmt: skip


def ended(due_s: float, end_s: float, stage: int = 1) -> Sample:
    return Sample(stage, due_s, 0.0, 0.001, pb.ALLSPARK_SUCCESS, -1, end_s, "length", 8)


def denied(due_s: float, hint_ms: int = 100, stage: int = 1) -> Sample:
    return Sample(stage, due_s, 0.0, 0.002, pb.ALLSPARK_REQUEST_DENIED, hint_ms)


def test_shares_make_the_arrivals_of_the_plan_together() -> None:
    plans = [
        Plan(
            addresses=("a",), model="m", stages=((500, 4), (50, 4)), prompt_tokens=2, new_tokens=1,
            share=share, shares=3,
        )
        for share in range(3)
    ]  # fmt: skip
    samples = [sample for plan in plans for sample in plan.arrivals(100.0)]
    first, second = ([s.due_s for s in samples if s.stage == stage] for stage in (0, 1))
    assert len(first) == pytest.approx(2000, rel=0.1) and len(second) == pytest.approx(200, rel=0.3)
    assert 100 <= min(first) <= max(first) < 104 <= min(second) <= max(second) < 108
    assert plans[0].arrivals(0) == plans[0].arrivals(0) != plans[1].arrivals(0)


def test_the_sustainable_rate_is_that_of_the_ends() -> None:
    assert sustainable([ended(0.0, 5 + n / 20) for n in range(100)]) == pytest.approx(20)
    with pytest.raises(CommandError, match="UNAVAILABLE"):
        sustainable([Sample(0, 0.0, reason="UNAVAILABLE: no broker")])


def test_recovery_begins_with_the_second_from_which_on_latency_is_normal() -> None:
    late = [denied(0.0), denied(0.7), ended(1.1, 9.0), ended(2.1, 1.0), ended(3.5, 4.0)]
    well = [ended(4.0 + n / 10, 1.2) for n in range(30)]
    assert recovery_s([*late, *well], 1.0) == pytest.approx(4.0)
    assert recovery_s([*well, ended(8.0, 5.0)], 1.0) == -1
    assert recovery_s([], 1.0) == -1


def test_what_is_accepted_and_does_not_end_is_lost() -> None:
    under = [ended(0.1, 1.0, 0), denied(0.2, 80, 0), denied(0.3, -1, 0), Sample(0, 0.4, reason="INTERNAL")]
    missed = Sample(0, 0.5, 0.0, 0.001, pb.ALLSPARK_SUCCESS, -1, 2.0, "deadline", 3)
    silent = Sample(0, 0.6, 0.0, 0.001, pb.ALLSPARK_SUCCESS)
    row = row_of(OVERLOAD, 5.0, [ended(0.0, 1.0)], [*under, missed, silent, ended(1.0, 1.0)], {})
    assert (row.offered, row.accepted, row.denied, row.unanswered) == (6, 3, 2, 1)
    assert (row.deadline_misses, row.lost, row.no_hint, row.recovery_s) == (1, 1, 1, 0.0)
    assert resident_mib(os.getpid()) > 10
    assert resident_mib(2**31 - 1) == 0


def test_many_times_the_load_of_a_fleet(tmp_path: Path) -> None:
    """All are answered, who is denied knows when to come back, what is accepted ends, memory is bounded."""
    model = tmp_path / "m.json"
    model.write_text(json.dumps({"max_batch": 4, "step_s": 0.02}))
    options = FleetOptions(
        start_timeout_s=300.0,
        worker_command=(sys.executable, SCRIPTED),
        model_roots=(tmp_path,),
        broker_args=("--max-queue=40",),
    )
    with Fleet(options) as fleet:
        fleet.load_model("m", model, ModelOptions(max_batch=4))
        row = measure(fleet, OVERLOAD)
    assert row.offered == row.accepted + row.denied, "all were answered"
    assert row.accepted > 0 and row.denied > 0
    assert (row.unanswered, row.no_hint, row.lost) == (0, 0, 0)
    assert set(row.memory_mib) == {"store", "broker-0", "gateway-0", "worker-0"}
    assert all(isinstance(m, Memory) and 0 < m.end <= m.peak < 1024 for m in row.memory_mib.values())
