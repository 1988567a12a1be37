"""`python -m tests.chaos.links`: how long clients wait when one pair of processes is cut.

One process of the first kind is cut off from all its peers of the second, in each way for the same time, with
default settings and under load; "broker-worker" cuts a broker off from all workers, "worker-broker" a worker
from all brokers. A row is one cut: the longest wait of any client, measured from the beginning of the cut,
and how long after the cut had ended the last of these waits lasted.
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
from tests.network.proxy import FAULTS, Proxy

PAIRS = ("worker-broker", "broker-worker", "worker-store", "gateway-broker", "gateway-store", "broker-store")
PAIRS += ("client-gateway",)
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


def links(made: CutFleet, pair: str, turn: int) -> list[Proxy]:
    """Of the process whose turn it is: who fled to one of two is met there by the next cut."""
    if pair == "broker-worker":
        return made.around_broker(turn % made.options.brokers)
    if pair.endswith("-broker"):  # the last number of each process means all brokers
        per_process = made.options.brokers + 1
        return made.links(pair, turn % 2 * per_process + made.options.brokers)
    return made.links(pair, turn % 2)


async def measure(
    made: CutFleet, store: Store, cut: tuple[str, str, int], cut_s: float, settle_s: float, clients: int
) -> tuple[Row, list[str]]:
    """The row of one cut (pair, way, turn), and what was wrong with any request."""
    pair, way, turn = cut
    load = Load(ScriptedWorkload(turn), made.client_addresses(), store, clients, name=f"cut-{turn}")
    loading = asyncio.create_task(load.run())
    await asyncio.sleep(settle_s)  # the consequences of the last one are over
    proxies = links(made, pair, turn)
    began = time.monotonic()
    for proxy in proxies:
        await asyncio.to_thread(proxy.set, FAULTS[way])
    await asyncio.sleep(cut_s)  # what the fault is
    for proxy in proxies:
        await asyncio.to_thread(proxy.heal)
    ended = time.monotonic()
    await asyncio.sleep(settle_s)
    load.finish()
    await loading
    found = waits(load.stories, began, ended, ended + settle_s)
    row = Row(pair, way, found, sum(s.finish_reason == "poison" for s in load.stories))
    print(row.line(), flush=True)
    return row, load.complaints


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.links", description=__doc__)
    parser.add_argument("--pair", action="append", choices=PAIRS, help="repeat for several (default: all)")
    parser.add_argument("--way", action="append", choices=list(FAULTS), help="the same for ways")
    parser.add_argument("--cut-s", type=float, default=8.0)
    parser.add_argument("--settle-s", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=16)
    flags = parser.parse_args()
    cuts = [(pair, way) for pair in flags.pair or PAIRS for way in flags.way or WAYS]
    turns = [(pair, way, turn) for turn, (pair, way) in enumerate(cuts)]
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
                complaints = asyncio.run(_measure(made, valkey.url, turns, flags))
        finally:
            valkey.kill()
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return 1 if complaints else 0


async def _measure(
    made: CutFleet, url: str, cuts: Sequence[tuple[str, str, int]], flags: argparse.Namespace
) -> list[str]:
    store, complaints = Store(url, patience_s=None), []
    try:
        for cut in cuts:
            _, wrong = await measure(made, store, cut, flags.cut_s, flags.settle_s, flags.clients)
            complaints += wrong
    finally:
        await store.close()
    return complaints


if __name__ == "__main__":
    sys.exit(main())
