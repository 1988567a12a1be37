"""The tables of spec section 3: what Get, GetNoWait, GenerateStatus and GeneratedLength answer, and when."""

import asyncio

import grpc
import grpc.aio
import pytest
from allspark_bus.ledger import Append, Ending, Ttl
from allspark_bus.store import Store
from allspark_gateway.main import Gateway
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from .conftest import EOS, Client, Producer

U = "u-1"
UUID = pb.UUID(uuid=U)


# ---- Get --------------------------------------------------------------------------------------------


async def test_get_returns_all_unread_tokens_and_only_new_ones(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10, 11)
    await producer.add(U, 2, 12)
    assert await client.get(U) == [10, 11, 12]
    await producer.add(U, 3, 13)
    assert await client.get(U) == [13]


async def test_get_waits_for_the_first_token(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    waiting = asyncio.create_task(client.get(U))
    await producer.until_parked(U)
    assert not waiting.done()
    await producer.add(U, 0, 10)
    assert await waiting == [10]


async def test_get_keeps_waiting_when_nothing_but_the_status_changes(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    waiting = asyncio.create_task(client.get(U))
    await producer.until_parked(U)
    assert (await producer.ledger.advance(f"default/{U}", 1, "w2")).outcome == "ok"
    await producer.ledger.advance(f"default/{U}", 2, "w")  # dispatched again, without a token
    assert await client.status(U) == pb.Init
    assert not waiting.done(), "a non-terminal Get never returns empty ids"
    await producer.finish(U, EOS)
    assert await waiting == []


async def test_get_of_a_finished_and_drained_request_has_zero_ids_and_is_not_empty(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10, ending=EOS)
    assert await client.get(U) == [10]
    for _ in range(2):
        reply, trailing = await client.call("Get", UUID)
        assert (reply.empty, list(reply.ids_from_generate)) == (0, [])
        assert reply.HasField("tensors_from_model_inference")
        assert trailing[metadata.FINISH_REASON] == "eos"
        assert trailing[metadata.REQUEST_STATUS] == str(pb.GenerateFinished)


async def test_get_delivers_the_tokens_of_an_interrupted_request_first(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10)
    await producer.finish(U, Ending(pb.GenerateInterrupted, "cache_memory", "the KV pool is full"))
    reply, trailing = await client.call("Get", UUID)
    assert list(reply.ids_from_generate) == [10]
    assert trailing[metadata.FINISH_REASON] == "cache_memory"
    assert trailing[metadata.REQUEST_STATUS] == str(pb.GenerateInterrupted)
    assert metadata.decode_text(trailing[metadata.REASON]) == "the KV pool is full"


async def test_the_end_comes_with_the_last_tokens_and_never_earlier(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10)
    _, trailing = await client.call("Get", UUID)
    assert metadata.FINISH_REASON not in trailing
    await producer.add(U, 1, 11, ending=Ending(pb.GenerateFinished, "length"))
    reply, trailing = await client.call("Get", UUID)
    assert list(reply.ids_from_generate) == [11]
    assert trailing[metadata.FINISH_REASON] == "length"


@pytest.mark.parametrize("rpc", ["Get", "GetNoWait"])
async def test_an_unknown_uuid_is_empty_at_once(client: Client, rpc: str) -> None:
    reply, trailing = await client.call(rpc, UUID)
    assert (reply.empty, list(reply.ids_from_generate)) == (1, [])
    assert trailing[metadata.GONE] == "unknown"
    assert trailing[metadata.STATUS] == str(pb.ALLSPARK_ILLEGAL_REQUEST_ID)


async def test_unknown_released_and_expired_are_three_answers(client: Client, store: Store) -> None:
    producer = Producer(store, Ttl(result_ms=1, tombstone_ms=60_000))
    for uuid in ("released", "expired"):
        await producer.admit(uuid)
        await producer.add(uuid, 0, 1, ending=EOS)
    await producer.release("released")
    while await store.command("EXISTS", "as:out:{default/expired}"):
        await asyncio.sleep(0.001)  # until Valkey's clock has passed the one millisecond
    reasons = set()
    for uuid in ("unknown", "released", "expired"):
        for rpc in ("Get", "GetNoWait", "GenerateStatus", "GeneratedLength"):
            reply, trailing = await client.call(rpc, pb.UUID(uuid=uuid))
            assert trailing[metadata.GONE] == uuid
            reasons.add(metadata.decode_text(trailing[metadata.REASON]))
            if rpc.startswith("Get"):
                assert reply.empty == 1 and reply.HasField("tensors_from_model_inference")
            elif rpc == "GenerateStatus":
                assert reply.status == pb.GenerateInterrupted
            else:
                assert reply.len == 0
    assert len(reasons) == 3


async def test_a_get_that_waits_is_empty_when_its_request_is_released(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    waiting = asyncio.create_task(client.call("Get", UUID))
    await producer.until_parked(U)
    await producer.release(U)
    reply, trailing = await waiting
    assert reply.empty == 1
    assert trailing[metadata.GONE] == "released"


async def test_get_honours_the_deadline_of_its_call(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.get(U, timeout_s=0.2)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await producer.add(U, 0, 10)
    assert await client.get(U) == [10], "the abandoned Get took nothing"


async def test_a_get_that_waited_takes_nothing_at_the_brink_of_its_deadline(
    client: Client, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer could be late, and a caller without its own cursor would never see the tokens."""
    monkeypatch.setattr("allspark_gateway.results.DEADLINE_MARGIN_S", 3600)
    await producer.admit(U)
    for limit_s in (1, 5, 30):  # a busy machine may not park it before its deadline
        waiting = asyncio.create_task(client.get(U, timeout_s=limit_s))
        while not (waiting.done() or await producer.num_subscribed(U)):
            await asyncio.sleep(0.001)  # polls Valkey, the other process
        if not waiting.done():
            break
    await producer.add(U, 0, 10)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await waiting
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await client.get(U) == [10], "what is there already is answered at once"


async def test_a_cancelled_get_takes_nothing(gateway: Gateway, client: Client, producer: Producer) -> None:
    await producer.admit(U)
    waiting = client.stub.Get(UUID)
    await producer.until_parked(U)
    waiting.cancel()
    assert await gateway._in_flight.is_idle_within(20), "the gateway has heard of it"
    await producer.add(U, 0, 10)
    assert await client.get(U) == [10]


async def test_tensors_arrive_under_their_names(client: Client, producer: Producer) -> None:
    tensor = pb.Tensor(data_type=pb.INT64, shape=pb.Tensor.Shape(dims=[1]), data=b"\1" + b"\0" * 7)
    await producer.admit(U)
    await producer.add(U, 0, 10, ending=EOS, tensors={"sequence_1": tensor.SerializeToString()})
    reply, _ = await client.call("Get", UUID)
    assert dict(reply.tensors_from_model_inference.tensor_map) == {"sequence_1": tensor}


async def test_tensors_without_tokens_come_in_an_element_of_their_own(
    client: Client, producer: Producer
) -> None:
    """The loop of Get and GenerateStatus sees them before the end, and no second time."""
    tensor = pb.Tensor(data_type=pb.FLOAT32, shape=pb.Tensor.Shape(dims=[1, 1]), data=b"\0" * 4)
    await producer.admit(U)
    waiting = asyncio.create_task(client.call("Get", UUID))
    await producer.until_parked(U)
    ending = Ending(pb.GenerateFinished, "inferred")
    await producer.add(U, 0, ending=ending, tensors={"logits": tensor.SerializeToString()})
    reply, trailing = await waiting
    assert not reply.ids_from_generate and not reply.empty
    assert dict(reply.tensors_from_model_inference.tensor_map) == {"logits": tensor}
    assert trailing[metadata.FINISH_REASON] == "inferred"
    assert await client.status(U) == pb.GenerateFinished and await client.length(U) == 0
    reply, _ = await client.call("Get", UUID)
    assert not reply.ids_from_generate and not reply.tensors_from_model_inference.tensor_map
    reply, trailing = await client.call("Get", UUID, metadata=[(metadata.CURSOR, "0")])
    assert dict(reply.tensors_from_model_inference.tensor_map) == {"logits": tensor}
    reply, _ = await client.call("Get", UUID, metadata=[(metadata.CURSOR, trailing[metadata.CURSOR])])
    assert not reply.tensors_from_model_inference.tensor_map


async def test_a_long_result_comes_in_order_and_the_end_last(
    client: Client, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allspark_bus.streams.MAX_ENTRIES", 64)
    await producer.admit(U)
    num_entries = 200  # more than one read returns
    await producer.ledger.append([Append(f"default/{U}", "m", 1, i, (i,)) for i in range(num_entries)])
    await producer.add(U, num_entries, num_entries, ending=EOS)
    got: list[int] = []
    trailing: dict[str, str] = {}
    while metadata.FINISH_REASON not in trailing:
        reply, trailing = await client.call("Get", UUID)
        assert reply.ids_from_generate
        got += reply.ids_from_generate
    assert got == list(range(num_entries + 1))


# ---- GetNoWait --------------------------------------------------------------------------------------


async def test_get_no_wait_never_waits(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    reply, trailing = await client.call("GetNoWait", UUID)
    assert (reply.empty, list(reply.ids_from_generate)) == (0, [])
    assert metadata.FINISH_REASON not in trailing
    await producer.add(U, 0, 10)
    assert await client.take(U) == [10]
    assert await client.take(U) == []
    await producer.finish(U, EOS)
    reply, trailing = await client.call("GetNoWait", UUID)
    assert (reply.empty, list(reply.ids_from_generate)) == (0, [])
    assert trailing[metadata.FINISH_REASON] == "eos"


async def test_get_no_wait_does_not_wait_behind_a_get(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    waiting = asyncio.create_task(client.get(U))
    await producer.until_parked(U)
    assert await client.take(U) == []
    await producer.add(U, 0, 10)
    assert await waiting == [10]


# ---- GenerateStatus and GeneratedLength -------------------------------------------------------------


async def test_status_goes_from_init_over_generating_to_its_end(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    assert await client.status(U) == pb.Init
    await producer.add(U, 0, 10)
    assert await client.status(U) == pb.Generating
    await producer.add(U, 1, 11, ending=EOS)
    reply, trailing = await client.call("GenerateStatus", UUID)
    assert reply.status == pb.GenerateFinished
    assert trailing[metadata.FINISH_REASON] == "eos"


async def test_a_stopped_request_without_tokens_is_finished(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    await producer.finish(U, Ending(pb.GenerateFinished, "stopped"))
    assert await client.status(U) == pb.GenerateFinished
    assert await client.get(U) == []


async def test_the_end_is_held_back_from_a_reader_until_its_tokens_are_read(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10)
    assert await client.get(U) == [10]
    await producer.add(U, 1, 11, ending=EOS)
    reply, trailing = await client.call("GenerateStatus", UUID)
    assert reply.status == pb.Generating
    assert metadata.FINISH_REASON not in trailing
    assert await client.get(U) == [11]
    assert await client.status(U) == pb.GenerateFinished


async def test_who_polls_the_status_without_reading_sees_the_end_at_once(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10, ending=EOS)
    assert await client.status(U) == pb.GenerateFinished
    assert await client.get(U) == [10]
    assert await client.status(U) == pb.GenerateFinished


async def test_the_end_is_held_back_for_a_bounded_time(gateways, producer: Producer) -> None:  # type: ignore[no-untyped-def]
    client = gateways.client(await gateways.open(status_deferral_s=0.05))
    await producer.admit(U)
    await producer.add(U, 0, 10)
    assert await client.get(U) == [10]
    await producer.add(U, 1, 11, ending=EOS)
    while await client.status(U) == pb.Generating:
        await asyncio.sleep(0.001)  # until the 50 milliseconds have passed
    assert await client.status(U) == pb.GenerateFinished
    assert await client.get(U) == [11]


async def test_length_counts_everything_and_reading_does_not_reduce_it(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    assert await client.length(U) == 0
    await producer.add(U, 0, 10, 11)
    assert await client.length(U) == 2
    assert await client.get(U) == [10, 11]
    await producer.add(U, 2, 12, ending=EOS)
    assert await client.length(U) == 3


# ---- the caller's own cursor ------------------------------------------------------------------------


async def test_a_caller_with_its_own_cursor_gets_what_follows_it_as_often_as_it_asks(
    client: Client, producer: Producer
) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10, 11, 12)
    for rpc in ("Get", "GetNoWait", "Get"):
        reply, trailing = await client.call(rpc, UUID, [(metadata.CURSOR, "1")])
        assert list(reply.ids_from_generate) == [11, 12]
        assert trailing[metadata.CURSOR] == "3"
    assert await client.get(U) == [10, 11, 12], "the server-side cursor did not move"


async def test_a_caller_with_its_own_cursor_waits_at_its_end(client: Client, producer: Producer) -> None:
    await producer.admit(U)
    await producer.add(U, 0, 10)
    waiting = asyncio.create_task(client.call("Get", UUID, [(metadata.CURSOR, "1")]))
    await producer.until_parked(U)
    assert not waiting.done()
    await producer.add(U, 1, 11, ending=EOS)
    reply, trailing = await waiting
    assert list(reply.ids_from_generate) == [11]
    assert trailing[metadata.FINISH_REASON] == "eos"
    reply, trailing = await client.call("Get", UUID, [(metadata.CURSOR, "2")])
    assert (list(reply.ids_from_generate), trailing[metadata.CURSOR]) == ([], "2")
    assert trailing[metadata.REQUEST_STATUS] == str(pb.GenerateFinished)


async def test_readers_at_different_positions_of_one_uuid_do_not_disturb_each_other(
    client: Client, producer: Producer
) -> None:
    """Field report 24: results were read by position, and a second reader took the first one's tokens."""
    await producer.admit(U)

    async def read_all() -> list[int]:
        got: list[int] = []
        trailing: dict[str, str] = {}
        while metadata.FINISH_REASON not in trailing:
            reply, trailing = await client.call("Get", UUID, [(metadata.CURSOR, str(len(got)))])
            got += reply.ids_from_generate
            assert trailing[metadata.CURSOR] == str(len(got))
        return got

    readers = [asyncio.create_task(read_all()) for _ in range(4)]
    for i in range(50):
        await producer.add(U, i, i)
    late = asyncio.create_task(read_all())
    await producer.finish(U, EOS)
    assert await asyncio.gather(*readers, late) == [list(range(50))] * 5
    assert await client.get(U) == list(range(50))


@pytest.mark.parametrize("cursor", ["-1", "x", "1.5", "9" * 30, ""])
async def test_a_cursor_that_is_none_is_a_parameter_error(
    client: Client, producer: Producer, cursor: str
) -> None:
    await producer.admit(U)
    reply, trailing = await client.call("Get", UUID, [(metadata.CURSOR, cursor)])
    assert reply.empty == 1
    assert trailing[metadata.STATUS] == str(pb.ALLSPARK_PARAM_ERROR)
    assert metadata.CURSOR in metadata.decode_text(trailing[metadata.REASON])


async def test_a_uuid_too_long_to_be_accepted_is_unknown(client: Client) -> None:
    reply, trailing = await client.call("Get", pb.UUID(uuid="x" * (1 << 20)))
    assert reply.empty == 1
    assert trailing[metadata.GONE] == "unknown"
    assert "1048576 bytes" in metadata.decode_text(trailing[metadata.REASON])
