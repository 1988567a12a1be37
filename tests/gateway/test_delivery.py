"""No token is lost, none comes twice: canonical loops, concurrent readers, gateways that die in between."""

import asyncio
import random

import pytest
from allspark_bus import keys
from allspark_bus.ledger import Ending
from allspark_bus.streams import Streams
from allspark_gateway import pace
from allspark_gateway import readers as readers_module
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from .conftest import EOS, Client, Gateways, Producer

TERMINAL = (pb.GenerateFinished, pb.GenerateInterrupted)


async def canonical_loop(client: Client, uuid: str) -> list[int]:
    """What every upstream client does: Get, then GenerateStatus, until the status is terminal."""
    got: list[int] = []
    while True:
        got += await client.get(uuid)
        if await client.status(uuid) in TERMINAL:
            return got


@pytest.mark.slow
async def test_the_canonical_loop_loses_nothing(client: Client, producer: Producer) -> None:
    """Spec 1.5 #6: terminal status visible before the last tokens."""
    seed, num_requests, at_once = 20240607, 600, 50
    rng = random.Random(seed)

    async def one(number: int) -> None:
        uuid, tokens = f"loop-{number}", [rng.randrange(1000) for _ in range(rng.randrange(1, 6))]
        await producer.admit(uuid)
        reading = asyncio.create_task(canonical_loop(client, uuid))
        at = 0
        while at < len(tokens):
            size = rng.randrange(1, 3)
            is_last = at + size >= len(tokens) and rng.random() < 0.5
            await producer.add(uuid, at, *tokens[at : at + size], ending=EOS if is_last else None)
            at += size
        if not is_last:
            await producer.finish(uuid, EOS)
        assert await reading == tokens, f"seed {seed}, request {number}"
        await producer.release(uuid)

    for start in range(0, num_requests, at_once):
        await asyncio.gather(*[one(n) for n in range(start, start + at_once)])


async def test_concurrent_gets_share_the_tokens_between_them(client: Client, producer: Producer) -> None:
    await producer.admit("u")

    async def read() -> list[list[int]]:
        answers: list[list[int]] = []
        while ids := await client.get("u"):
            answers.append(ids)
        return answers

    reading = [asyncio.create_task(read()) for _ in range(4)]
    for i in range(200):
        await producer.add("u", i, i)
    await producer.finish("u", EOS)
    answers = [ids for reader in await asyncio.gather(*reading) for ids in reader]
    assert sorted(t for ids in answers for t in ids) == list(range(200))
    assert all(ids == list(range(ids[0], ids[-1] + 1)) for ids in answers)


async def test_two_gateways_serve_one_reader_in_turn(gateways: Gateways, producer: Producer) -> None:
    clients = [gateways.client(await gateways.open()) for _ in range(2)]
    await producer.admit("u")
    got: list[int] = []
    for i in range(10):
        await producer.add("u", i, i, ending=EOS if i == 9 else None)
        got += await clients[i % 2].get("u")
    assert got == list(range(10))
    assert await clients[1].status("u") == pb.GenerateFinished


async def test_gets_parked_at_two_gateways_share_the_tokens(gateways: Gateways, producer: Producer) -> None:
    clients = [gateways.client(await gateways.open()) for _ in range(2)]
    await producer.admit("u")
    got: list[int] = []

    async def read(client: Client) -> None:
        while ids := await client.get("u"):
            got.extend(ids)

    reading = [asyncio.create_task(read(c)) for c in clients]
    await producer.until_parked("u", gateways=2)
    for i in range(20):
        await producer.add("u", i, i)
    await producer.finish("u", EOS)
    await asyncio.gather(*reading)
    assert sorted(got) == list(range(20))


async def test_tokens_of_an_answer_that_a_gateway_took_to_its_grave_come_from_another(
    gateways: Gateways, producer: Producer
) -> None:
    client = gateways.client(await gateways.open(redelivery_s=5))  # enough to ask meanwhile
    await producer.admit("u")
    await producer.add("u", 0, 10, 11)
    dead = Streams(producer.store)  # what a gateway does before it is killed: it takes and never settles
    assert (await dead.take("default/u", "dead-call", "")).tokens == (10, 11)
    await producer.add("u", 2, 12, ending=EOS)
    assert await client.take("u") == [], "they may be on their way: nothing is delivered twice"
    assert await client.status("u") == pb.Generating
    assert await client.get("u") == [10, 11, 12]
    assert await client.get("u") == []


async def test_an_answer_that_could_not_be_written_is_taken_back(
    client: Client, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is cancelled when its tokens have been taken already."""
    await producer.admit("u")
    cancelled = asyncio.Event()
    take = Streams.take
    call = client.stub.Get(pb.UUID(uuid="u"))

    async def take_then_cancel(self: Streams, rid: str, call_id: str, confirmed: str) -> object:
        batch = await take(self, rid, call_id, confirmed)
        if batch.tokens and not cancelled.is_set():
            cancelled.set()
            call.cancel()
            await asyncio.get_running_loop().create_future()  # until the cancellation arrives here
        return batch

    monkeypatch.setattr(Streams, "take", take_then_cancel)
    await producer.add("u", 0, 10)
    await asyncio.wait_for(cancelled.wait(), 60)
    assert await client.get("u") == [10]


async def test_the_confirmation_travels_with_the_next_take_or_alone(
    client: Client, producer: Producer
) -> None:
    await producer.admit("u")
    await producer.add("u", 0, 10)
    assert await client.get("u") == [10]
    await producer.add("u", 1, 11)
    assert await client.get("u") == [11], "this gateway confirms its own earlier answer at once"
    while await producer.store.command("HGET", keys.request("default/u"), "rs"):
        await asyncio.sleep(0.001)  # polls Valkey until the lonely confirmation came
    assert await producer.store.command("HGET", keys.request("default/u"), "cur") == b"2"


async def test_many_streams_are_answered_less_often_but_begin_and_end_at_once(
    gateways: Gateways, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "ANSWERS_PER_S", 0.0001)  # as if the gateway were far over its rate
    client = gateways.client(await gateways.open(gather_s=3600))
    await producer.admit("u")
    first = asyncio.create_task(client.get("u"))
    await producer.until_parked("u")
    await producer.add("u", 0, 0)
    assert await first == [0], "the first token never waits"
    second = asyncio.create_task(client.call("Get", pb.UUID(uuid="u")))
    for i in range(1, 10):
        await producer.add("u", i, i)
    await producer.finish("u", Ending(pb.GenerateFinished, "length"))
    reply, trailing = await second
    assert list(reply.ids_from_generate) == list(range(1, 10)), "gathered, and answered when the end came"
    assert trailing[metadata.FINISH_REASON] == "length"


async def test_a_restart_of_redis_loses_nothing(valkey, client: Client, producer: Producer) -> None:  # type: ignore[no-untyped-def]
    await producer.admit("u")
    await producer.add("u", 0, 10)
    assert await client.get("u") == [10]
    waiting = asyncio.create_task(client.get("u"))
    await producer.until_parked("u")
    valkey.kill()
    valkey.start()
    await producer.add("u", 1, 11, ending=EOS)
    assert await waiting == [11]


async def test_idle_readers_are_forgotten(
    gateways: Gateways, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers_module, "LINGER_S", 0.01)
    gateway = await gateways.open()
    client = gateways.client(gateway)
    for uuid in ("a", "b"):
        await producer.admit(uuid)
        await producer.add(uuid, 0, 1)
        assert await client.get(uuid) == [1]
    await client.call("Get", pb.UUID(uuid="unknown"))
    while len(gateway._readers):
        await asyncio.sleep(0.001)  # until the sweep has come by
