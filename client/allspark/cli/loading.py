"""A progress bar for a model that loads: what the workers report to their broker."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from allspark_bus.broker_client import BrokerClient
from allspark_bus.curve import ClientKeys
from allspark_bus.errors import FleetError
from allspark_proto import fleet_pb2 as fleet
from rich.progress import Progress, TaskID

from allspark.cli.console import err, progress

POLL_S = 0.2
CALL_TIMEOUT_S = 5.0


@contextmanager
def loading_bar(model: str, frontends: Sequence[str], keys: ClientKeys | None) -> Iterator[None]:
    """Show how far a model is while the block runs; off a terminal this does nothing."""
    if not err.is_terminal:
        yield
        return
    with progress() as bars:
        task = bars.add_task(f"loading {model}", total=None)
        done = threading.Event()
        client = partial(BrokerClient, frontends, keys=keys)
        watch = threading.Thread(target=asyncio.run, args=(_watch(client, model, bars, task, done),))
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()


async def _watch(
    connect: Callable[[], BrokerClient], model: str, bars: Progress, task: TaskID, done: threading.Event
) -> None:
    client = connect()
    try:
        while not await asyncio.to_thread(done.wait, POLL_S):
            _show(await _status(client), model, bars, task)
    finally:
        await client.close()


async def _status(client: BrokerClient) -> fleet.FleetStatus:
    try:
        envelope = fleet.Envelope(get_fleet_status=fleet.GetFleetStatus())
        return (await client.call(envelope, CALL_TIMEOUT_S)).fleet_status
    except FleetError:  # the bar stands still; the call that loads the model tells what is wrong
        return fleet.FleetStatus()


def _show(status: fleet.FleetStatus, model: str, bars: Progress, task: TaskID) -> None:
    for found in status.models:
        if found.name == model:
            known = found.state == "building" and found.progress > 0
            total = 1.0 if known else None  # None: the bar runs back and forth
            bars.update(task, description=f"{found.state} {model}", total=total, completed=found.progress)
