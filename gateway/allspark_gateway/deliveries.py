"""The fate of answers that moved the server-side cursor: Redis keeps their tokens until they arrived.

The confirmation travels with the next take of the same uuid; if none comes, it is sent by itself after
`CONFIRM_S` to twice that. An answer that did not go out is taken back at once, and one that was lost with its
gateway is given back by Redis (`Streams.take`).
"""

import asyncio
import itertools
import logging
import uuid as uuid_lib
from dataclasses import dataclass

from allspark_bus.errors import FleetError
from allspark_bus.streams import Batch, Streams
from allspark_proto import allspark_service_pb2 as pb
from redis.exceptions import RedisError

from allspark_gateway.readers import Reader

log = logging.getLogger(__name__)

CONFIRM_S = 0.05


@dataclass(frozen=True, slots=True)
class Delivery:
    """An answer whose fate matters: exactly one of `arrived` and `lost` must be called."""

    response: pb.GeneratedElements
    owner: "Deliveries"
    reader: Reader
    call: str

    def arrived(self) -> None:
        """The answer went out."""
        self.owner.arrived(self.reader, self.call)

    def lost(self) -> None:
        """It did not."""
        self.owner.lost(self.reader, self.call)


class Deliveries:
    """Takes tokens and follows their answers."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._prefix = uuid_lib.uuid4().hex[:12]
        self._serial = itertools.count()
        self._fresh: dict[str, Reader] = {}  # call id -> reader; delivered since the last tick
        self._older: dict[str, Reader] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def new_call(self) -> str:
        """An id for one take."""
        return f"{self._prefix}-{next(self._serial)}"

    async def take(self, reader: Reader, call: str) -> Batch:
        """Takes what is unread, and confirms the answer before it."""
        confirmed = reader.delivered
        batch = await self._streams.take(reader.rid, call, confirmed)
        if confirmed:
            self._settled(reader, confirmed)
        reader.cursor = batch.end if batch.outcome == "ok" else 0
        return batch

    def arrived(self, reader: Reader, call: str) -> None:
        """The answer of this call went out."""
        reader.delivered = call
        self._fresh[call] = reader
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CONFIRM_S, self._tick)
        reader.nudge()

    def lost(self, reader: Reader, call: str) -> None:
        """The answer of this call, if there was one, did not go out: its tokens become unread again."""
        self._spawn(self._take_back(reader, call))

    async def _take_back(self, reader: Reader, call: str) -> None:
        try:
            await self._streams.settle(reader.rid, call, arrived=False)
        except (FleetError, RedisError) as e:
            log.warning("request %s: an undelivered answer waits for its time-out: %s", reader.rid, e)
        reader.stir()

    def _tick(self) -> None:
        self._timer = None
        due, self._older, self._fresh = self._older, self._fresh, {}
        if due:
            self._spawn(self._confirm(due))
        if self._older:
            self._timer = asyncio.get_running_loop().call_later(CONFIRM_S, self._tick)

    async def _confirm(self, calls: dict[str, Reader]) -> None:
        try:
            await asyncio.gather(
                *[self._streams.settle(reader.rid, call, arrived=True) for call, reader in calls.items()]
            )
        except (FleetError, RedisError) as e:
            log.warning("%d delivered answers could not be confirmed: %s", len(calls), e)
        for call, reader in calls.items():
            self._settled(reader, call)

    def _settled(self, reader: Reader, call: str) -> None:
        self._fresh.pop(call, None)
        self._older.pop(call, None)
        if reader.delivered == call:
            reader.delivered = ""

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def flush(self) -> None:
        """Confirms everything that arrived; for the end of the process."""
        if self._timer is not None:
            self._timer.cancel()
        calls = self._older | self._fresh
        self._older, self._fresh = {}, {}
        if calls:
            await self._confirm(calls)
        if self._tasks:
            await asyncio.wait(self._tasks)
