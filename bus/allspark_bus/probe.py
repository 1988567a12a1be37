"""Tells a server that is away from a connection that is dead while its server answers others.

After a cut a connection may stay open though nothing of it ever arrives again. Waiting for the time-out of
its reply would cost seconds after the network is back; another connection finds out.
"""

import asyncio
import logging
from types import TracebackType
from typing import Self

from redis.exceptions import RedisError

from allspark_bus.connections import NewConnection
from allspark_bus.round_trip import end, exchange

log = logging.getLogger(__name__)

#: An answer that takes longer is doubted. Doubled while the same calls go on without answer: what takes long
#: because the link is slow must come through in the end.
FIRST_S = 2.0
ANSWER_S = 1.0
PAUSE_S = 0.5


class Probe:
    """While in use, lets `limit` expire once a new connection is answered; begins after `after_s` seconds."""

    def __init__(self, new_connection: NewConnection, limit: asyncio.Timeout, after_s: float) -> None:
        self._new_connection = new_connection
        self._limit = limit
        self._after_s = after_s
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            if await self._is_answered():
                break
            await asyncio.sleep(PAUSE_S)  # the server may be away for long
        log.warning("Redis answers a new connection, but not the one in use; leaving that")
        self._limit.reschedule(asyncio.get_running_loop().time())

    async def _is_answered(self) -> bool:
        connection = self._new_connection()
        try:
            async with asyncio.timeout(ANSWER_S):
                await connection.connect()  # type: ignore[no-untyped-call]
                await exchange(connection, [("PING",)])
        except (RedisError, OSError):
            return False
        finally:
            await end(connection)
        return True
