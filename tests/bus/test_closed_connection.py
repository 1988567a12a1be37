"""A connection that was closed under its user is a lost one, whatever the event loop calls that."""

import asyncio

import pytest
import uvloop
from allspark_bus.round_trip import end, exchange
from allspark_bus.store import Store
from redis.exceptions import ConnectionError

from tests.conftest import ValkeyProcess


def test_write_to_a_closed_connection_is_a_lost_connection(valkey: ValkeyProcess) -> None:
    async def close_and_write() -> None:
        store = Store(valkey.url)
        node = store.home("k")
        assert node is not None
        connection = node.new_connection()
        await connection.connect()
        transport = connection._writer.transport
        transport.abort()
        while "closed=True" not in repr(transport):
            await asyncio.sleep(0)  # until the loop has closed the handle
        with pytest.raises(ConnectionError):
            await exchange(connection, [("PING",)])
        await end(connection)
        await store.close()

    uvloop.run(close_and_write())
