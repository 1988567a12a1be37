"""The operator table (spec 2.6.4) and the rate window."""

from __future__ import annotations

import re

from allspark_workers.engine.profiler import Profiler
from allspark_workers.engine.rates import RateWindow

ROW = re.compile(r"^0 {9}(\S+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$", re.M)


def test_the_table_has_upstreams_layout_and_true_numbers() -> None:
    profiler = Profiler()
    for ms in (2.0, 4.0):
        profiler.add("forward", "Linear", ms / 1e3)
    profiler.add("forward", "RMSNorm", 0.002)
    profiler.add("alloc", "Schedule", 0.0005)
    lines = profiler.text().split("\n")
    assert lines[:5] == ["*" * 19, "* decode worker", "*" * 19, "", "*** forward ***"]
    assert lines[5] == lines[7] == "-" * 95
    assert lines[6] == (
        "rank      opname              count     min_ms    max_ms    ave_ms    total_ms       percentage"
    )
    assert (
        lines[8]
        == "0         Linear              2         2.00      4.00      3.00      6.00           75.00     "
    )
    assert lines[9].split() == ["0", "RMSNorm", "1", "2.00", "2.00", "2.00", "2.00", "25.00"]
    assert lines[10:12] == ["-" * 95, ""]
    assert [line for line in lines if line.startswith("***") and line.endswith("***") and " " in line] == [
        "*** forward ***",
        "*** reshape ***",
        "*** alloc ***",
    ]


def test_prefill_comes_before_decode_and_reading_clears() -> None:
    profiler = Profiler()
    profiler.add("forward", "Linear", 0.001)
    profiler.phase = "prefill"
    profiler.add("forward", "Linear", 0.004)
    text = profiler.text(reset=False)
    assert text.index("* prefill worker") < text.index("* decode worker")
    assert [match[1] for match in ROW.finditer(text)] == ["Linear", "Linear"]
    assert profiler.text() == text
    assert profiler.text() == ""


def test_the_rate_counts_only_the_window() -> None:
    window = RateWindow()
    assert window.rate(5.0) == 0.0
    for second in range(100, 130):
        window.add(7, float(second))
    assert abs(window.rate(129.5) - 7.0) < 0.1
    assert window.rate(134.0) < 5.0
    assert window.rate(200.0) == 0.0


def test_the_rate_of_a_young_window_is_over_its_age() -> None:
    window = RateWindow()
    window.add(10, 50.0)
    window.add(10, 51.0)
    assert window.rate(52.0) == 10.0
    assert len(window._buckets) <= 42
