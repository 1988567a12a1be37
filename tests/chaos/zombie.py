"""`python -m tests.chaos.zombie`: a worker is stopped for a minute and continued, with default settings.

Its requests go on elsewhere meanwhile. When it goes on itself, no stream may change: neither those that it
had begun, nor those of the uuids that were released and used again while it slept.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from allspark.client import AsyncClient, AsyncRequest, GenerateOptions
from allspark.launcher import Fleet, FleetOptions
from allspark_bus import keys
from allspark_bus.broker_client import BrokerClient
from allspark_bus.store import Store
from allspark_proto import fleet_pb2 as fleet

from tests.chaos.scripted import SCRIPTED
from tests.fleet.scripted_engine import expected_tokens

NUM_REQUESTS, NUM_TOKENS = 12, 300
POLL_S = 0.1
LIMIT_S = 60.0


class Zombie:
    """The run; `complaints` says what was wrong."""

    def __init__(self, processes: Fleet, pause_s: float) -> None:
        self._processes = processes
        self._pause_s = pause_s
        self.complaints: list[str] = []
        self.moved_s = 0.0

    async def run(self) -> None:
        self._store = Store(self._processes.redis_url)
        self._broker = BrokerClient(self._processes.frontends)
        async with AsyncClient(self._processes.addresses) as client:
            requests = [await self._submit(client, i, [i + 1, 5]) for i in range(NUM_REQUESTS)]
            begun = [await anext(request.stream()) for request in requests]
            zombie = self._processes.workers[0]
            zombie.signal(signal.SIGSTOP)
            until = time.monotonic() + self._pause_s
            await self._finish(requests, begun)
            self.moved_s = self._pause_s - (until - time.monotonic())
            await requests[0].release()  # and its uuid is used again, for other tokens
            again = await self._submit(client, 0, [500, 6])
            self._expect("the same uuid again", await again.result(), [500, 6])
            await asyncio.sleep(max(0.0, until - time.monotonic()))  # what the fault is
            await self._until_workers(1)
            before = await self._streams()
            zombie.signal(signal.SIGCONT)
            await self._until_workers(2)
            if await self._streams() != before:
                self.complaints.append("the worker that was continued changed a stream")
            if zombie.num_starts != 1:
                self.complaints.append("the worker did not continue but was started again")
        await self._broker.close()
        await self._store.close()

    async def _submit(self, client: AsyncClient, number: int, prompt: list[int]) -> AsyncRequest:
        options = GenerateOptions(max_new_tokens=NUM_TOKENS)
        return await client.submit("m", prompt, options, f"zombie-{number}")

    async def _finish(self, requests: Sequence[AsyncRequest], begun: Sequence[list[int]]) -> None:
        tails = await asyncio.gather(*[request.result() for request in requests])
        for i, (head, tail) in enumerate(zip(begun, tails, strict=True)):
            self._expect(f"request {i}", head + tail, [i + 1, 5])

    def _expect(self, what: str, tokens: list[int], prompt: list[int]) -> None:
        if tokens != expected_tokens(prompt, NUM_TOKENS):
            self.complaints.append(f"{what}: got {tokens}")

    async def _streams(self) -> list[object]:
        rids = [keys.request_id("default", f"zombie-{i}") for i in range(NUM_REQUESTS)]
        return [await self._store.command("XRANGE", keys.stream(rid), "-", "+") for rid in rids]

    async def _until_workers(self, number: int) -> None:
        """Until the broker knows so many workers and they hold no request (polling other processes)."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                call = fleet.Envelope(get_fleet_status=fleet.GetFleetStatus())
                status = (await self._broker.call(call, LIMIT_S)).fleet_status
                if (len(status.workers), status.inflight_requests) == (number, 0):
                    return
                await asyncio.sleep(POLL_S)


def run(pause_s: float) -> Zombie:
    """Raises only if the fleet cannot be started."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "m.json").write_text('{"max_length": 512, "max_batch": 8, "step_s": 0.02}')
        command = (sys.executable, SCRIPTED)
        options = FleetOptions(workers=2, model_roots=(root,), worker_command=command, drain_s=5.0)
        with Fleet(options) as processes:
            processes.load_model("m", root / "m.json")
            zombie = Zombie(processes, pause_s)
            asyncio.run(zombie.run())
            return zombie


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.zombie", description=__doc__)
    parser.add_argument("--pause-s", type=float, default=60.0)
    pause_s = parser.parse_args().pause_s
    zombie = run(pause_s)
    for complaint in zombie.complaints:
        print(f"FAILED: {complaint}")
    print(
        f"a worker stopped for {pause_s:g} s and continued: its requests had ended elsewhere after "
        f"{zombie.moved_s:.1f} s; {len(zombie.complaints)} complaint(s)"
    )
    return 1 if zombie.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
