"""`allspark bench overload` against the scripted engine: what the fleet itself can take.

``python -m tests.fleet.overloaded --times 10`` prints the row; ``--step-s`` sets the rate.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from allspark.cli.bench_overload import MAX_BATCH, Overload, measure
from allspark.client import ModelOptions
from allspark.launcher import Fleet, FleetOptions

SCRIPTED = str(Path(__file__).with_name("scripted_engine.py"))
NEW_TOKENS = 32


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.overloaded", description=__doc__)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--deadline-s", type=float, default=5.0)
    parser.add_argument("--step-s", type=float, default=0.01, help="time of a step of the engine")
    flags = parser.parse_args()
    overload = Overload(
        model="m",
        times=flags.times,
        seconds=flags.seconds,
        deadline_s=flags.deadline_s,
        prompt_tokens=32,
        new_tokens=NEW_TOKENS,
        seed=1,
        processes=1,
    )
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "m.json"
        model.write_text(json.dumps({"step_s": flags.step_s}))
        options = FleetOptions(worker_command=(sys.executable, SCRIPTED), model_roots=(model.parent,))
        with Fleet(options) as fleet:
            fleet.load_model("m", model, ModelOptions(max_batch=MAX_BATCH))
            row = measure(fleet, overload)
    for name, value in row._asdict().items():
        print(f"{name:20} {value:.1f}" if isinstance(value, float) else f"{name:20} {value}")
    return 1 if row.lost or row.unanswered else 0


if __name__ == "__main__":
    sys.exit(main())
