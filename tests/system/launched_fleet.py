"""Run as ``python launched_fleet.py DIRECTORY``: a fleet of two of each kind, until its input ends.

Data and models lie in the directory; m.json is built and started. One line tells addresses and process ids.
"""

import json
import sys
from pathlib import Path

from allspark.launcher import Fleet, FleetOptions

SCRIPTED = str(Path(__file__).parents[1] / "fleet" / "scripted_engine.py")


def main(directory: Path) -> None:
    options = FleetOptions(
        workers=2,
        brokers=2,
        gateways=2,
        data_dir=directory / "data",
        redis_fsync="always",
        model_roots=(directory,),
        worker_command=(sys.executable, SCRIPTED),
        drain_s=1.0,
        start_timeout_s=300.0,
    )
    with Fleet(options, lambda name, line: print(f"{name} | {line}", file=sys.stderr)) as fleet:
        fleet.load_model("m", directory / "m.json")
        pids = [process.pid for process in fleet.processes.values()]
        print(json.dumps({"addresses": fleet.addresses, "pids": pids}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
