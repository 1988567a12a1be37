"""What a broker that died left behind of a model that is released meanwhile."""

import asyncio
import time
from pathlib import Path

from allspark_bus import keys
from allspark_bus.ledger import Entry, Ledger
from allspark_proto import allspark_service_pb2 as pb

from tests.conftest import ValkeyProcess
from tests.fleet.harness import MiniFleet, request


async def test_request_that_was_admitted_after_its_model_was_released_ends(
    valkey: ValkeyProcess, tmp_path: Path
) -> None:
    """A broker with an old view of the catalogue admitted it and died: no model leads to the request."""
    fleet = MiniFleet(valkey.url, tmp_path, "--result-ttl-s=2", worker_timeout_s=2.0)
    try:
        body = request("u", [1, 2, 3], 5, "released").SerializeToString()
        entry = Entry("default/u", "released", 1, "", body, int(time.time() * 1000), 0, 0, 0, 0)
        await Ledger(fleet.store, broker="dead").admit(entry, b"digest")
        result = await fleet.result("u")
        assert (result.status, result.reason) == (pb.GenerateInterrupted, "model_stopped")
        async with asyncio.timeout(60):
            while await fleet.store.command("EXISTS", keys.open_requests("released")):
                await asyncio.sleep(0.02)  # the index follows the terminal record
    finally:
        await fleet.close()
