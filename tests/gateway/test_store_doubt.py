"""A gateway that Redis is silent to: who can go elsewhere is told soon, who cannot is kept waiting."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from allspark_gateway import readiness, store_doubt
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from .conftest import Gateways, Producer

CURSOR = ((metadata.CURSOR, "0"),)
LONG_S = 1000.0


async def test_a_parked_get_with_its_own_cursor_ends_soon_and_others_wait(
    gateways: Gateways, producer: Producer, valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "INTERVAL_S", 0.01)
    monkeypatch.setattr(readiness, "PATIENCE_S", 0.2)
    monkeypatch.setattr(readiness, "DOUBT_S", 0.05)
    for name in ("SPREAD_S", "GRACE_S"):
        monkeypatch.setattr(store_doubt, name, 0.1)
    client = gateways.client(await gateways.open(call_timeout_s=LONG_S))
    await producer.admit("a")
    await producer.admit("b")
    movable = asyncio.ensure_future(client.call("Get", pb.UUID(uuid="a"), metadata=CURSOR, timeout_s=LONG_S))
    waiting = asyncio.ensure_future(client.call("Get", pb.UUID(uuid="b"), timeout_s=LONG_S))
    await producer.until_parked("a")
    await producer.until_parked("b")
    valkey.kill()
    calls = [movable, client.call("Get", pb.UUID(uuid="a"), metadata=CURSOR, timeout_s=LONG_S)]
    calls.append(client.call("GetNoWait", pb.UUID(uuid="a"), metadata=CURSOR, timeout_s=LONG_S))
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError, match="Redis does not answer this gateway") as error:
            await asyncio.wait_for(call, 30)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not waiting.done()
    valkey.start()
    await producer.add("b", 0, 7)
    reply, _ = await asyncio.wait_for(waiting, 30)
    assert list(reply.ids_from_generate) == [7]
    async with asyncio.timeout(30):
        while True:  # until it has noticed that Redis is back
            try:
                reply, _ = await client.call(
                    "GetNoWait", pb.UUID(uuid="b"), metadata=CURSOR, timeout_s=LONG_S
                )
                break
            except grpc.aio.AioRpcError:
                continue
    assert list(reply.ids_from_generate) == [7]
