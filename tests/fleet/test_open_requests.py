"""Thousands of open requests; `make open-requests` runs the same with 10,000 and prints the figures."""

from tests.fleet.open_requests import run

COUNT = 1_200
"""More than the thousand new calls that gRPC lets wait by default."""


def test_thousands_of_open_requests_end_correctly_and_cost_little() -> None:
    report = run(COUNT)
    assert not report.wrong
    assert report.open_requests == COUNT
    before, parked = report.connections
    assert parked <= before + 3, "parked Gets share one subscription"
    assert all(kib < 100 for kib in report.kib_each().values()), report.kib_each()
