"""`python -m tests.soak --seconds 600 --seed 7`: a day of traffic in minutes; `make soak` does the same."""

import argparse
import random
import sys
from pathlib import Path

from tests.soak import report
from tests.soak.run import Options, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="which traffic (default: a new one)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of traffic after the warm-up")
    parser.add_argument("--warm-up-s", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=144.0, help="requests begun in a second, at most")
    parser.add_argument("--clients", type=int, default=24, help="requests that are open at a time")
    parser.add_argument("--idle-connections", type=int, default=16)
    parser.add_argument("--restart-s", type=float, default=20.0, help="between restarts; 0: none")
    parser.add_argument("--engine", choices=("scripted", "real"), default="scripted")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="directory of the report")
    flags = vars(parser.parse_args())
    directory: Path = flags.pop("out")
    directory.mkdir(parents=True, exist_ok=True)
    flags["seed"] = random.SystemRandom().randrange(1 << 31) if flags["seed"] is None else flags["seed"]
    outcome = run(Options(**flags, log=directory / "fleet.log"))
    report.write(outcome, directory)
    print(report.markdown(outcome))
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
