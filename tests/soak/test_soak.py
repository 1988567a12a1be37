"""A soak in miniature: after traffic of every sort a fleet holds what it held before."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tests.soak import report
from tests.soak.run import Options, Outcome, run
from tests.soak.samples import Samples
from tests.soak.verdict import MIB, held_longer, theil_sen, trend

SHORT = Options(
    seed=20_261_205, seconds=4.0, warm_up_s=2.0, clients=8, least=40, idle_connections=4, restart_s=1.5
)


@pytest.mark.slow
def test_traffic_of_every_sort_leaves_nothing_behind() -> None:
    outcome = run(replace(SHORT, sample_s=1.0))
    assert not outcome.complaints, "\n".join([f"seed {SHORT.seed}", *outcome.complaints])
    assert outcome.counts["restarts"] > 0
    assert outcome.num_requests > SHORT.clients
    assert {"gateway-0", "broker-0", "worker-0", "store"} == set(outcome.samples.series)
    assert outcome.samples.series["broker-0"]["allspark_broker.workers.WorkerTable._workers"]


def line(slope: float, noise: float = 0.0) -> list[tuple[float, float]]:
    return [(float(t), 1000 + slope * t + noise * (t % 7 == 0)) for t in range(100)]


def test_slope_is_that_of_the_line_in_spite_of_outliers() -> None:
    assert theil_sen(line(2.5)) == pytest.approx(2.5)
    assert theil_sen(line(2.5, noise=10_000)) == pytest.approx(2.5, abs=0.5)
    assert theil_sen(line(0.0, noise=10_000)) == pytest.approx(0.0)
    assert theil_sen([(1.0, 5.0)]) == 0.0


def test_growth_is_what_the_second_half_adds_beyond_the_bound() -> None:
    assert trend("p", "Broker._map", line(4)).is_growth  # 196 more entries, the bound is 10 %
    assert not trend("p", "Broker._map", line(1)).is_growth
    assert not trend("p", "resident bytes", line(MIB / 100)).is_growth
    assert trend("p", "resident bytes", line(MIB)).is_growth
    filled = [*line(-5)[:50], *[(float(t), 500.0) for t in range(50, 100)]]
    assert not trend("p", "Broker._map", filled).is_growth


def test_what_follows_the_rate_of_the_traffic_is_no_growth() -> None:
    rates = [(at, 50 + at) for at, _ in line(0)]
    following = [(at, 20 * rate) for at, rate in rates]
    assert trend("p", "Broker._map", following).is_growth
    assert not trend("p", "Broker._map", following, rates).is_growth
    assert trend("p", "Broker._map", line(20), [(at, 50.0) for at, _ in rates]).is_growth


def test_bounded_caches_are_held_against_their_bound() -> None:
    assert not trend("p", "allspark_broker.worker_checks.WorkerChecks._good", line(20)).is_growth
    assert trend("p", "allspark_broker.worker_checks.WorkerChecks._good", line(200)).is_growth


def test_idle_process_may_not_hold_more_than_before() -> None:
    before = {"descriptors": 20.0, "Broker._map": 3.0, "resident bytes": 1.0}
    assert held_longer("p", before, {"descriptors": 24.0, "Broker._map": 11.0, "resident bytes": 9e9}) == []
    assert held_longer("p", before, {"descriptors": 25.0, "Broker._other": 9.0}) == [
        "p, idle again: Broker._other is 9, it was 0",
        "p, idle again: descriptors is 25, it was 20",
    ]


def test_report_has_a_row_for_every_trend_and_a_panel_for_what_is_plotted() -> None:
    samples = Samples()
    samples.add({"p": {"descriptors": 5.0, "objects": 7.0}}, 0)
    samples.add({"p": {"descriptors": 6.0, "map": 2.0}}, 10)
    assert samples.rates[0][1] == 0 < samples.rates[1][1]
    assert [value for _, value in samples.series["p"]["map"]] == [0.0, 2.0]
    assert [value for _, value in samples.series["p"]["objects"]] == [7.0, 0.0]
    outcome = Outcome(SHORT, num_requests=43_200, seconds=100.0, samples=samples)
    outcome.trends = [trend("p", "descriptors", line(0))]
    text = report.markdown(outcome)
    assert "12.0 hours" in text
    assert "| p | descriptors | 1000 | 0.0 | 50 |" in text
    lines = ElementTree.fromstring(report.svg(outcome)).iter("{http://www.w3.org/2000/svg}polyline")
    assert len(list(lines)) == 2
