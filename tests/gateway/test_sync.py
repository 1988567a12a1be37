"""SyncRequest (spec 1.4.12): every row of its table."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from allspark_bus.ledger import Ending, Ttl
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from .conftest import EOS, Client, Gateways, Producer


async def sync(client: Client, uuid: str = "", model: str = "", **more: Any) -> tuple[int, str]:
    message = pb.StopRequestRequest(uuid=uuid, model_name=model)
    reply, _ = await client.call("SyncRequest", message, **more)
    return reply.as_status, reply.uuid


async def test_it_answers_when_the_request_ends(client: Client, producer: Producer) -> None:
    await producer.admit("u")
    waiting = asyncio.create_task(sync(client, "u"))
    await producer.until_parked("u")
    await producer.add("u", 0, 1)
    assert await client.status("u") == pb.Generating
    assert not waiting.done()
    await producer.add("u", 1, 2, ending=EOS)
    assert await waiting == (0, "u")
    assert await client.get("u") == [1, 2], "one Get drains everything"


async def test_tokens_do_not_make_it_look_again(
    client: Client, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from allspark_bus.streams import Streams

    looks = 0
    view = Streams.view

    async def counting(self: Streams, rid: str) -> Any:
        nonlocal looks
        looks += 1
        return await view(self, rid)

    await producer.admit("u")
    waiting = asyncio.create_task(sync(client, "u"))
    await producer.until_parked("u")
    monkeypatch.setattr(Streams, "view", counting)
    for i in range(50):
        await producer.add("u", i, i)
    await producer.finish("u", EOS)
    await waiting
    assert looks <= 3, "one when hearing began, one at the end"


@pytest.mark.parametrize("status", [pb.GenerateFinished, pb.GenerateInterrupted])
async def test_a_request_that_has_ended_answers_at_once(
    client: Client, producer: Producer, status: int
) -> None:
    await producer.admit("u")
    await producer.finish("u", Ending(status, "stopped"))
    assert await sync(client, "u") == (0, "u")


async def test_an_unknown_uuid_is_illegal_and_waits_for_nobody(client: Client, producer: Producer) -> None:
    await producer.admit("live")
    reply, trailing = await client.call("SyncRequest", pb.StopRequestRequest(uuid="u"))
    assert (reply.as_status, reply.uuid) == (pb.ALLSPARK_ILLEGAL_REQUEST_ID, "u")
    assert "unknown" in metadata.decode_text(trailing[metadata.REASON])


async def test_a_released_or_expired_request_has_ended(client: Client, store: Store) -> None:
    producer = Producer(store, Ttl(result_ms=1, tombstone_ms=60_000))
    for uuid in ("released", "expired"):
        await producer.admit(uuid)
        await producer.finish(uuid, EOS)
    await producer.release("released")
    assert await sync(client, "released") == (0, "released")
    assert await sync(client, "expired") == (0, "expired")


async def test_a_release_during_the_wait_ends_it(client: Client, producer: Producer) -> None:
    await producer.admit("u")
    waiting = asyncio.create_task(sync(client, "u"))
    await producer.until_parked("u")
    await producer.release("u")
    assert await waiting == (0, "u")


async def test_the_wrong_model_is_a_parameter_error(client: Client, producer: Producer) -> None:
    await producer.admit("u", model="m")
    assert await sync(client, "u", "other") == (pb.ALLSPARK_PARAM_ERROR, "u")
    await producer.finish("u", EOS)
    assert await sync(client, "u", "m") == (0, "u")


async def test_without_a_uuid_it_waits_for_all_that_are_live_now(client: Client, producer: Producer) -> None:
    for uuid in ("a", "b", "done"):
        await producer.admit(uuid)
    await producer.finish("done", EOS)
    waiting = asyncio.create_task(sync(client))
    while not (await producer.num_subscribed("a") or await producer.num_subscribed("b")):
        await asyncio.sleep(0.001)  # polls Valkey until it waits
    await producer.admit("late")
    await producer.finish("a", EOS)
    assert await client.status("b") == pb.Init
    assert not waiting.done()
    await producer.finish("b", EOS)
    assert await waiting == (0, ""), "late came after the snapshot, and no uuid is echoed"


async def test_without_a_uuid_and_with_a_model_it_waits_for_that_model(
    client: Client, producer: Producer
) -> None:
    await producer.admit("mine", model="m")
    await producer.admit("other", model="other")
    waiting = asyncio.create_task(sync(client, model="m"))
    await producer.until_parked("mine")
    await producer.finish("mine", EOS)
    assert await waiting == (0, "")
    assert await sync(client, model="no-such-model") == (0, "")


async def test_without_requests_it_answers_at_once(client: Client) -> None:
    assert await sync(client) == (0, "")


async def test_it_blocks_nobody_and_a_cancelled_wait_leaves_nothing(
    gateways: Gateways, producer: Producer
) -> None:
    gateway = await gateways.open()
    client = gateways.client(gateway)
    await producer.admit("u")
    waiting = client.stub.SyncRequest(pb.StopRequestRequest())
    await producer.until_parked("u")
    stopped, _ = await client.call("StopRequest", pb.StopRequestRequest(uuid="u"))
    assert stopped.as_status == 0
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while not await gateway._in_flight.is_idle_within(0):
        await asyncio.sleep(0.001)  # until the cancellation reached the gateway
    assert gateway._readers.enter("default/u").users == 1, "only this test uses it"


async def test_a_deadline_ends_the_wait_of_the_call_only(client: Client, producer: Producer) -> None:
    await producer.admit("u")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await sync(client, "u", timeout_s=0.1)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await client.status("u") == pb.Init
