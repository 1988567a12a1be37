"""``allspark bench prefix``: what it asks for is what the server counts, and the plot shows the numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import transformers
from allspark.cli.bench_prefix import SPAN_TOKENS, cached_tokens
from allspark.cli.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, line_plot, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("rate", "spans"), [(0.0, 0), (0.3, 2), (0.5, 4), (0.9, 6), (0.99, 6)])
def test_cached_tokens_are_whole_spans_and_never_the_last_token(rate: float, spans: int) -> None:
    assert cached_tokens(rate, 7 * SPAN_TOKENS) == spans * SPAN_TOKENS
    assert cached_tokens(rate, 7 * SPAN_TOKENS + 1) <= 7 * SPAN_TOKENS


@pytest.mark.parametrize("high", [0.03, 0.9, 1.0, 5.1, 87.5, 99.0, 100.0, 1718.1])
def test_ticks_are_round_and_cover_the_range(high: float) -> None:
    found = ticks(high)
    assert found[0] == 0 and found[-1] >= high > found[-2]
    assert 3 <= len(found) <= 9
    digits = f"{found[1]:e}".split("e")[0].rstrip("0.")
    assert digits in ("1", "2", "5")


def test_the_plot_puts_points_where_the_axes_say() -> None:
    points = [Point(0.0, 1000.0, 900.0, 1100.0), Point(50.0, 400.0, 300.0, 500.0)]
    root = ElementTree.fromstring(line_plot(points, "a < b", "x", "y"))
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in root.iter(f"{SVG}circle")]
    bottom = HEIGHT - BOTTOM
    x_end, y_end = ticks(50.0)[-1], ticks(1100.0)[-1]
    expected = [
        (LEFT + (WIDTH - RIGHT - LEFT) * p.x / x_end, bottom - (bottom - TOP) * p.y / y_end) for p in points
    ]
    assert circles == [pytest.approx(place, abs=0.06) for place in expected]
    assert "a < b" in [text.text for text in root.iter(f"{SVG}text")]
    with pytest.raises(ValueError, match="nothing to draw"):
        line_plot([], "", "", "")


def test_hit_rates_through_a_fleet(tmp_path: Path) -> None:
    """The rates come from GetAsEngineStat; the command refuses counters that do not add up to the prompt."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=200, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "tiny")
    plot = tmp_path / "plot.svg"
    command = [
        *(sys.executable, "-m", "allspark.cli", "bench", "prefix", f"--model={tmp_path / 'tiny'}", "--json"),
        *("--prefix-tokens=200", "--hit-rate=0", "--hit-rate=60", "--repeat=2", f"--plot={plot}"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["cached_tokens"] for row in rows] == [0, 128]
    assert [row["hit_rate"] for row in rows] == [0.0, 128 / 200]
    assert all(0 < row["ttft_ms_low"] <= row["ttft_ms"] <= row["ttft_ms_high"] for row in rows)
    assert len(list(ElementTree.parse(plot).iter(f"{SVG}circle"))) == 2
