"""Every pair of processes is cut, both ways and one way, reset and slowed down, while requests run.

One fleet of two of each serves all cases. A case cuts the first process of a kind off from its peers; the
second ones are the other way, so every request must end during the cut, with the tokens of the quiet run and
exactly one terminal record. Afterwards the cut is healed and what was cut off must serve again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from uuid import uuid4

import pytest
from allspark.launcher import FleetOptions
from allspark_bus.broker_client import BrokerClient
from allspark_bus.store import Store
from allspark_proto import fleet_pb2 as fleet

from tests.chaos.load import Load
from tests.chaos.network import CutFleet
from tests.chaos.run import balance
from tests.chaos.scripted import ScriptedWorkload
from tests.chaos.workload import MODEL
from tests.conftest import ValkeyProcess
from tests.network.proxy import FAULTS, Link

PATIENCE_S = 120.0
#: Cut at the same time, in different ways; neither has part in the other's way around.
GROUPS = [
    ("worker-broker", "gateway-store"),
    ("worker-store", "gateway-broker"),
    ("broker-store", "client-gateway"),
]


@pytest.fixture(scope="module")
def cut_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CutFleet, ValkeyProcess]]:
    root = tmp_path_factory.mktemp("fleet")
    (root / "data").mkdir()
    served = ScriptedWorkload(0).serve(root)
    valkey = ValkeyProcess(root / "data")
    valkey.start()
    options = FleetOptions(
        workers=2,
        brokers=2,
        gateways=2,
        redis=valkey.url,
        model_roots=served.roots,
        drain_s=5.0,
        start_timeout_s=300.0,
        worker_command=served.worker_command,
        # Longer than a process may just not be let run: who lost two workers is quarantined.
        broker_args=("--worker-timeout-s=5", "--heartbeat-s=0.2", "--ack-timeout-s=5"),
        worker_args=("--heartbeat-s=0.2", "--broker-timeout-s=2"),
        gateway_args=("--call-timeout-s=2.0",),
    )
    try:
        with CutFleet(options, lambda name, line: print(f"{name} | {line}")) as made:
            made.load_model(MODEL, served.path)
            yield made, valkey
    finally:
        valkey.kill()


@pytest.fixture
async def store(cut_fleet: tuple[CutFleet, ValkeyProcess]) -> AsyncIterator[Store]:
    s = Store(cut_fleet[1].url)
    yield s
    await s.close()


async def until_whole(made: CutFleet) -> None:
    """Both brokers, as both gateways reach them, see both workers with an answering store."""
    for broker in made.frontends:
        client = BrokerClient([broker])
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    reply = await client.call(
                        fleet.Envelope(get_fleet_status=fleet.GetFleetStatus()), PATIENCE_S
                    )
                    workers = reply.fleet_status.workers
                    if len(workers) == 2 and all(w.store_silent_s == 0 for w in workers):
                        break
                    await asyncio.sleep(0.05)  # polling: nothing tells what a broker has heard
        finally:
            await client.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.02)  # polling: what clients got is a list


async def bout(made: CutFleet, store: Store, seed: int, links: dict[str, Link]) -> list[str]:
    """What is wrong after requests began before and during a cut, and ended in it."""
    load = Load(ScriptedWorkload(seed), made.client_addresses(), store, clients=6, name=uuid4().hex)
    loading = asyncio.create_task(load.run())
    await until(lambda: any(s.tokens for s in load.stories))
    for pair, link in links.items():
        for proxy in made.all_links(pair):
            await asyncio.to_thread(proxy.set, link)
    count = len(load.stories)
    await until(lambda: len(load.stories) >= count + 6)
    load.finish()
    await loading
    for pair in links:
        for proxy in made.all_links(pair):
            await asyncio.to_thread(proxy.heal)
    ends = {s.finish_reason for s in load.stories} - {"length", "stopped"}
    return load.complaints + [f"ended with {end!r}" for end in ends]


@pytest.mark.slow
@pytest.mark.parametrize("pairs", GROUPS, ids=" ".join)
async def test_requests_end_well_while_processes_are_cut_off(
    cut_fleet: tuple[CutFleet, ValkeyProcess],
    store: Store,
    pairs: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allspark.client.aio.GET_WAIT_S", 2.0)  # how long a client trusts a silent gateway
    made, _ = cut_fleet
    ways = list(FAULTS)
    for number in range(len(ways)):
        chosen = {pair: ways[(number + shift) % len(ways)] for shift, pair in enumerate(pairs)}
        links = {pair: FAULTS[way] for pair, way in chosen.items()}
        assert not await bout(made, store, number + 1, links), chosen
        await until_whole(made)
    assert await balance(store, made.addresses) == []
