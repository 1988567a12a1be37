"""Kills under load on the real model: every stream equals the one of a quiet run, every request ends once."""

import asyncio
import random
import signal
from collections.abc import Sequence

import pytest
from allspark.client import AsyncClient, GenerateOptions
from allspark.launcher import Fleet
from allspark_bus import keys
from allspark_bus.store import Store
from allspark_bus.streams import Streams

from tests.fleet.harness import polled

START_TIMEOUT_S = 300.0
SEED = 20_240_607
NEW = 16


def prompts(count: int, low: int = 8, high: int = 48) -> list[list[int]]:
    rng = random.Random(SEED)
    return [[rng.randrange(1000, 40_000) for _ in range(rng.randint(low, high))] for _ in range(count)]


def options(index: int, new: int = NEW) -> GenerateOptions:
    """Half of the requests are greedy, half are sampled with their own seed."""
    if index % 2 == 0:
        return GenerateOptions(max_new_tokens=new)
    return GenerateOptions(max_new_tokens=new, do_sample=True, temperature=0.9, top_p=0.95, seed=index)


async def run_one(addresses: Sequence[str], prompt: list[int], opts: GenerateOptions) -> list[int]:
    async with AsyncClient(addresses) as client, await client.submit("smollm2", prompt, opts) as request:
        return await request.result()


@pytest.fixture(scope="module")
def quiet(real_fleet: Fleet) -> list[list[int]]:
    """Each request alone, one after the other."""

    async def run() -> list[list[int]]:
        return [await run_one(real_fleet.addresses, p, options(i)) for i, p in enumerate(prompts(64))]

    return asyncio.run(run())


async def assert_clean(fleet: Fleet) -> None:
    """The page ledger balances and Redis holds nothing but models and tombstones."""
    async with AsyncClient(fleet.addresses) as client:

        async def is_idle() -> bool:
            stat = await client.stat("smollm2")
            used = (stat.used_span, stat.pendding_request, stat.running_request)
            return not any(used) and stat.free_span == stat.total_span > 0

        await polled(is_idle)  # an engine lets go of what was released after its step
    store = Store(fleet.redis_url)

    async def only_models_are_left() -> bool:
        left = [k.decode() for k in await store.command("KEYS", "as:*")]
        rest = [k for k in left if not k.startswith("as:req:")]
        return sorted(rest) == [keys.BROKERS, keys.model("smollm2"), keys.MODELS]

    await polled(only_models_are_left)  # indexes follow
    for key in await store.command("KEYS", "as:req:*"):
        assert (await store.command("HGETALL", key))[:3] == [b"st", b"released", b"ep"]
    await store.close()


async def test_64_clients_at_once_get_what_a_quiet_run_gets(
    real_fleet: Fleet, quiet: list[list[int]]
) -> None:
    addresses = real_fleet.addresses
    runs = [
        run_one(addresses[i % 2 :] + addresses[: i % 2], p, options(i)) for i, p in enumerate(prompts(64))
    ]
    assert await asyncio.gather(*runs) == quiet, f"seed {SEED}"
    await assert_clean(real_fleet)


async def test_a_killed_worker_is_continued_by_another(real_fleet: Fleet, quiet: list[list[int]]) -> None:
    async with AsyncClient(real_fleet.addresses) as client:
        requests = [await client.submit("smollm2", p, options(i)) for i, p in enumerate(prompts(12))]
        first = requests[0].stream()
        head = await anext(first)
        victim = real_fleet.workers[0]
        victim.kill()
        tail = [t async for tokens in first for t in tokens]
        results = [head + tail, *await asyncio.gather(*[r.result() for r in requests[1:]])]
        assert results == quiet[:12]
        assert {r.finish_reason for r in requests} == {"length"}
        for r in requests:
            await r.release()
    victim.wait_ready(START_TIMEOUT_S)


async def test_a_gateway_that_dies_is_replaced_by_another(real_fleet: Fleet, quiet: list[list[int]]) -> None:
    first, second = (g.ready["grpc"][0] for g in real_fleet.gateways)
    async with AsyncClient([first]) as client:
        request = await client.submit("smollm2", prompts(1)[0], options(0))
        stream = request.stream()
        received = list(await anext(stream))
        real_fleet.gateways[0].kill()
    async with AsyncClient([second]) as other:
        heir = other.attach("smollm2", request.uuid, received=len(received))
        received += await heir.result()
        assert received == quiet[0]
        await heir.release()
    real_fleet.gateways[0].wait_ready(START_TIMEOUT_S)
    await assert_clean(real_fleet)


async def test_a_worker_paused_and_continued_appends_nothing(
    real_fleet: Fleet, quiet: list[list[int]]
) -> None:
    """The zombie wakes up after its requests have moved."""
    store = Store(real_fleet.redis_url)
    async with AsyncClient(real_fleet.addresses) as client:
        requests = [await client.submit("smollm2", p, options(i)) for i, p in enumerate(prompts(4))]
        head = await anext(requests[0].stream())
        zombie = real_fleet.workers[1]
        zombie.signal(signal.SIGSTOP)
        try:
            results = list(await asyncio.gather(*[r.result() for r in requests]))
        finally:
            zombie.signal(signal.SIGCONT)
        assert [head + results[0], *results[1:]] == quiet[:4]
        lengths = [
            (await Streams(store).view(keys.request_id("default", r.uuid))).num_tokens for r in requests
        ]
        assert lengths == [NEW] * 4
        for r in requests:
            await r.release()
    await store.close()


async def test_the_seeded_request_is_the_same_with_any_neighbours(real_fleet: Fleet) -> None:
    """Alone, among 31 neighbours, and with a prompt that is prefilled in chunks while others decode."""
    rng = random.Random(SEED)
    long_prompt = [rng.randrange(1000, 40_000) for _ in range(400)]
    opts = GenerateOptions(
        max_new_tokens=16, do_sample=True, temperature=1.0, top_k=50, seed=7, repetition_penalty=1.2
    )
    addresses = real_fleet.addresses
    for prompt in (prompts(1)[0], long_prompt):
        alone = await run_one(addresses, prompt, opts)
        neighbours = [run_one(addresses, p, options(i, 12)) for i, p in enumerate(prompts(31))]
        among, *_ = await asyncio.gather(run_one(addresses, prompt, opts), *neighbours)
        assert among == alone
