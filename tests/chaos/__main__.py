"""`python -m tests.chaos --faults 1000 --seed 7`: a long run with a report; `make chaos` does the same."""

import argparse
import random
import sys
from pathlib import Path

from tests.chaos import report
from tests.chaos.run import ENGINES, Options, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="which schedule (default: a new one)")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--brokers", type=int, default=2)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16, help="requests that are open at a time")
    parser.add_argument("--longest-pause-s", type=float, default=8.0)
    parser.add_argument("--worker-timeout-s", type=float, default=None, help="default: the broker's")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no fault after this time")
    parser.add_argument("--engine", choices=list(ENGINES), default="scripted", help="breadth or depth")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"), help="directory of the report")
    flags = vars(parser.parse_args())
    directory: Path = flags.pop("out")
    directory.mkdir(parents=True, exist_ok=True)
    flags["seed"] = random.SystemRandom().randrange(1 << 31) if flags["seed"] is None else flags["seed"]
    options = Options(**flags, log=directory / "fleet.log")
    print(f"chaos: {options.replay}", flush=True)
    outcome = run(options)
    report.write(outcome, directory)
    print(report.markdown(outcome))
    if outcome.complaints:
        print(f"FAILED; repeat it with: {options.replay}")
    elif report.is_slow(outcome):
        print("FAILED: requests went on too late after their worker was killed")
    return 1 if outcome.complaints or report.is_slow(outcome) else 0


if __name__ == "__main__":
    sys.exit(main())
