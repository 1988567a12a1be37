"""One round trip on one connection, and what is asked of a server in one."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, RedisError, TimeoutError

Arg = str | bytes | int | float
Command = tuple[Arg, ...]

REPLY_TIMEOUT_S = 10.0
ROLE_POLL_S = 0.02


def pack(commands: Sequence[Command]) -> bytes:
    """Commands as Redis reads them."""
    # The stub of hiredis takes a tuple of exactly one argument.
    return b"".join([hiredis.pack_command(c) for c in commands])  # type: ignore[arg-type]


async def send(connection: AbstractConnection, commands: Sequence[Command]) -> None:
    """Writes commands. Raises ConnectionError if the connection is gone."""
    try:
        await connection.send_packed_command(pack(commands), check_health=False)
    except RuntimeError as e:
        # What uvloop says of a transport that has been closed (uvloop/handles/handle.pyx, _ensure_alive).
        raise ConnectionError(f"the connection was closed: {e}") from e


async def exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    """One round trip; an error reply is its RedisError.

    One time-out for all of it: one for each reply costs more than the reply.
    """
    replies: list[Any] = []
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await send(connection, commands)
        for _ in commands:
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except (ConnectionError, TimeoutError):
                raise
            except RedisError as e:
                replies.append(e)
    return replies


async def end(connection: AbstractConnection) -> None:
    """Closes a connection, whatever its state."""
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)


def address_of(connection: AbstractConnection) -> str:
    """HOST:PORT or the path of a socket."""
    host, port = getattr(connection, "host", None), getattr(connection, "port", None)
    return f"{host}:{port}" if host else str(getattr(connection, "path", ""))


async def until_replicated(ask: Callable[[], Awaitable[Any]], wanted: int, patience_s: float) -> None:
    """Waits until `wanted` replicas have confirmed what the master has at the first look.

    `ask` is the command ROLE. Raises ConnectionError: no master, or not in time; RedisError of the command.
    """
    limit_s, offset = time.monotonic() + patience_s, None
    while True:
        reply = await ask()
        if isinstance(reply, Exception):
            raise reply
        if reply[0] != b"master":
            raise ConnectionError(f"the server is no master but {reply[0].decode()}")
        offset = reply[1] if offset is None else offset
        confirmed = sum(int(replica[2]) >= offset for replica in reply[2])
        if confirmed >= wanted:
            return
        if time.monotonic() >= limit_s or len(reply[2]) < wanted:
            raise ConnectionError(f"{wanted} replica(s) must have what was written, but {confirmed} do")
        await asyncio.sleep(ROLE_POLL_S)  # polling: a master tells nobody that its replicas caught up
