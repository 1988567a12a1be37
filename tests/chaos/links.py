"""`python -m tests.chaos.links`: how long clients wait when one pair of processes is cut.

The first process of a kind is cut off from all its peers of another kind, in each way for the same time,
with default settings and under load. A row is one cut: the longest wait of any client, measured from the
beginning of the cut, and how long after the cut had ended the last of these waits lasted.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allspark.launcher import FleetOptions
from allspark_bus.store import Store

from tests.chaos.load import Load, Story
from tests.chaos.network import CutFleet
from tests.chaos.scripted import ScriptedWorkload
from tests.chaos.workload import MODEL
from tests.conftest import ValkeyProcess
from tests.network.proxy import FAULTS

PAIRS = ("worker-broker", "worker-store", "gateway-broker", "gateway-store", "broker-store", "client-gateway")
WAYS = ("cut", "cut-up", "cut-down", "reset")
NOTICED_S = 0.5  # a wait that is longer has to do with the cut


@dataclass(frozen=True, slots=True)
class Row:
    """`waits`: of each wait that the cut explains, its length and its end after the cut's end, in s."""

    pair: str
    way: str
    waits: list[tuple[float, float]]
    poisoned: int

    def line(self) -> str:
        """Of the table."""
        longest = max((wait for wait, _ in self.waits), default=0.0)
        after = max((late for _, late in self.waits), default=0.0)
        figures = f"{len(self.waits)} | {longest:.1f} | {max(0.0, after):.1f} | {self.poisoned}"
        return f"| {self.pair} | {self.way} | {figures} |"


HEAD = [
    "| between | way | waits | longest (s) | of it after the cut (s) | poison |",
    "| --- | --- | --- | --- | --- | --- |",
]


def waits(stories: Sequence[Story], began: float, ended: float, until: float) -> list[tuple[float, float]]:
    """The waits of clients longer than `NOTICED_S` between the begin of a cut and `until`."""
    found = []
    for story in stories:
        for before, after in zip(story.events, story.events[1:], strict=False):
            seconds = after - max(before, began)
            if before < until and seconds > NOTICED_S:
                found.append((seconds, after - ended))
    return found


async def measure(
    made: CutFleet, store: Store, cuts: Sequence[tuple[str, str]], cut_s: float, settle_s: float, clients: int
) -> tuple[list[Row], list[str]]:
    """The rows, and what was wrong with any request."""
    load = Load(ScriptedWorkload(1), made.client_addresses(), store, clients)
    loading = asyncio.create_task(load.run())
    rows = []
    for pair, way in cuts:
        await asyncio.sleep(settle_s)  # the consequences of the last one are over
        first, began = len(load.stories), time.monotonic()
        for proxy in made.all_links(pair):
            await asyncio.to_thread(proxy.set, FAULTS[way])
        await asyncio.sleep(cut_s)  # what the fault is
        for proxy in made.all_links(pair):
            await asyncio.to_thread(proxy.heal)
        ended = time.monotonic()
        await asyncio.sleep(settle_s)
        recent = load.stories[max(0, first - clients) :]
        while any(s.events[-1] < ended and not s.is_over for s in recent):
            await asyncio.sleep(0.1)  # polling: what clients got is a list
        found = waits(recent, began, ended, ended + settle_s)
        rows.append(Row(pair, way, found, sum(s.finish_reason == "poison" for s in recent)))
        print(rows[-1].line(), flush=True)
    load.finish()
    await loading
    return rows, load.complaints


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.links", description=__doc__)
    parser.add_argument("--pair", action="append", choices=PAIRS, help="repeat for several (default: all)")
    parser.add_argument("--way", action="append", choices=list(FAULTS), help="the same for ways")
    parser.add_argument("--cut-s", type=float, default=8.0)
    parser.add_argument("--settle-s", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=16)
    flags = parser.parse_args()
    cuts = [(pair, way) for pair in flags.pair or PAIRS for way in flags.way or WAYS]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "data").mkdir()
        served = ScriptedWorkload(1).serve(root)
        valkey = ValkeyProcess(root / "data")
        valkey.start()
        try:
            options = FleetOptions(
                workers=3, brokers=2, gateways=2, redis=valkey.url, model_roots=served.roots, drain_s=5.0,
                worker_command=served.worker_command,
            )  # fmt: skip
            with CutFleet(options, lambda name, line: print(f"{name} | {line}", file=sys.stderr)) as made:
                made.load_model(MODEL, served.path)
                print("\n".join(HEAD), flush=True)
                complaints = asyncio.run(_measure(made, valkey.url, cuts, flags))
        finally:
            valkey.kill()
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return 1 if complaints else 0


async def _measure(
    made: CutFleet, url: str, cuts: Sequence[tuple[str, str]], flags: argparse.Namespace
) -> list[str]:
    store = Store(url, patience_s=None)
    try:
        _, complaints = await measure(made, store, cuts, flags.cut_s, flags.settle_s, flags.clients)
        return complaints
    finally:
        await store.close()


if __name__ == "__main__":
    sys.exit(main())
