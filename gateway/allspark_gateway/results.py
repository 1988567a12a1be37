"""GenerateStatus, GeneratedLength, Get and GetNoWait: views on the request's stream (spec 3)."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from allspark_bus import keys
from allspark_bus.streams import Batch, Streams
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata

from allspark_gateway import answers
from allspark_gateway.answers import Context, Gone, Pairs
from allspark_gateway.deliveries import Deliveries, Delivery
from allspark_gateway.readers import Reader, Readers
from allspark_gateway.settings import GatewaySettings
from allspark_gateway.store_doubt import StoreDoubt
from allspark_gateway.unsent import NoRoom, Unsent

#: A Get that has waited takes no tokens when its caller's deadline is this near: the answer could be late,
#: and a caller without its own cursor would never see them.
DEADLINE_MARGIN_S = 0.01

MAX_CURSOR = 2**53
ENDED = (pb.GenerateFinished, pb.GenerateInterrupted)


class Results:
    """The readers' part of the service, for the callers of one listener."""

    def __init__(
        self,
        streams: Streams,
        readers: Readers,
        deliveries: Deliveries,
        unsent: Unsent,
        settings: GatewaySettings,
        tenant: str,
        doubt: StoreDoubt,
    ) -> None:
        self._doubt = doubt
        self._streams = streams
        self._readers = readers
        self._deliveries = deliveries
        self._unsent = unsent
        self._tenant = tenant
        self._deferral_ms = int(settings.status_deferral_s * 1000)
        self._max_uuid_bytes = settings.max_uuid_bytes

    async def generate_status(self, request: pb.UUID, context: Context) -> pb.GenerateRequestStatus:
        """Where the request stands; the end is told when its tokens are read, or a bounded time later."""
        rid = self.request_id(request.uuid)
        told = await self._streams.status(rid, self._readers.delivered_call(rid), self._deferral_ms)
        if told.outcome != "ok":
            raise Gone(request.uuid, told.outcome)
        if told.status in ENDED:
            context.set_trailing_metadata(answers.of_end(told.status, told.reason, told.message))
        return pb.GenerateRequestStatus(status=pb.GENERATE_STATUS.ValueType(told.status))

    async def generated_length(self, request: pb.UUID, context: Context) -> pb.GenerateLen:
        """Tokens generated so far, read or not."""
        view = await self._streams.view(self.request_id(request.uuid))
        if view.outcome != "ok":
            raise Gone(request.uuid, view.outcome)
        return pb.GenerateLen(len=view.num_tokens)

    async def get(self, request: pb.UUID, context: Context) -> pb.GeneratedElements | Delivery:
        """Waits for tokens and takes them; zero ids mean that the request ended and all were taken."""
        reader = self._readers.enter(self.request_id(request.uuid))
        batch: Batch | None = None
        call = self._deliveries.new_call()
        try:
            batch = await self._when_room(context, partial(self._take_next, reader, call, context))
        except asyncio.CancelledError:
            self._deliveries.lost(reader, call)
            raise
        finally:
            self._readers.exit(reader, is_over=_is_over(batch))
        return self._deliver(request.uuid, reader, call, batch, context)

    async def get_no_wait(self, request: pb.UUID, context: Context) -> pb.GeneratedElements | Delivery:
        """Takes what is there; zero ids mean that nothing new is."""
        reader = self._readers.enter(self.request_id(request.uuid))
        batch: Batch | None = None
        call = self._deliveries.new_call()
        try:
            take = partial(self._deliveries.take, reader, call)
            batch = await self._when_room(context, partial(self._look, reader.rid, context, take))
        except asyncio.CancelledError:
            self._deliveries.lost(reader, call)
            raise
        finally:
            self._readers.exit(reader, is_over=_is_over(batch))
        if batch.outcome == "busy":  # what is unread is on its way to somebody else
            batch = Batch("ok")
        return self._deliver(request.uuid, reader, call, batch, context)

    async def get_from(self, request: pb.UUID, context: Context) -> pb.GeneratedElements:
        """Get for a caller that keeps its own cursor: nothing moves, so nothing can be lost."""
        cursor = _cursor_of(context)
        rid = self.request_id(request.uuid)
        reader = self._readers.enter(rid)
        batch: Batch | None = None
        try:
            look = partial(self._look, rid, context, partial(self._streams.read, rid, cursor))
            async with self._doubt.limited():
                batch = await self._when_room(
                    context, partial(self._readers.next_batch, reader, look, cursor)
                )
        finally:
            self._readers.exit(reader, is_over=_is_over(batch))
        return self._elements(request.uuid, batch, context, ((metadata.CURSOR, str(batch.end)),))

    async def get_no_wait_from(self, request: pb.UUID, context: Context) -> pb.GeneratedElements:
        """GetNoWait for a caller that keeps its own cursor."""
        cursor = _cursor_of(context)
        rid = self.request_id(request.uuid)
        read = partial(self._streams.read, rid, cursor)
        async with self._doubt.limited():
            batch = await self._when_room(context, partial(self._look, rid, context, read))
        return self._elements(request.uuid, batch, context, ((metadata.CURSOR, str(batch.end)),))

    def request_id(self, uuid: str) -> str:
        """The fleet-wide id; raises Gone for a uuid so long that it was never accepted."""
        if len(uuid.encode()) > self._max_uuid_bytes:
            raise Gone(f"{uuid[:32]}... ({len(uuid.encode())} bytes)", "unknown")
        return keys.request_id(self._tenant, uuid)

    async def _look(self, rid: str, context: Context, look: Callable[[], Awaitable[Batch]]) -> Batch:
        return await self._unsent.look(context.peer(), rid, look)

    async def _when_room(self, context: Context, read: Callable[[], Awaitable[Batch]]) -> Batch:
        """`read`, again and again, until there is room for what it finds. Nobody else waits for that."""
        while True:
            await self._unsent.room(context.peer())
            with contextlib.suppress(NoRoom):
                return await read()

    def _elements(
        self, uuid: str, batch: Batch, context: Context, trailing: Pairs = ()
    ) -> pb.GeneratedElements:
        """The answer, which counts as unsent until its call is over."""
        elements = _elements(uuid, batch, context, trailing)
        gone = self._unsent.count(context.peer(), elements.ByteSize())
        context.add_done_callback(cast("Any", lambda _: gone()))
        return elements

    async def _take_next(self, reader: Reader, call: str, context: Context) -> Batch:
        has_waited = False

        async def look() -> Batch:
            nonlocal has_waited
            if has_waited:
                await _unless_deadline_is_near(context)
            has_waited = True
            take = partial(self._deliveries.take, reader, call)
            return await self._look(reader.rid, context, take)

        async with reader.turn:
            return await self._readers.next_batch(reader, look, None)

    def _deliver(
        self, uuid: str, reader: Reader, call: str, batch: Batch, context: Context
    ) -> pb.GeneratedElements | Delivery:
        response = self._elements(uuid, batch, context)
        return Delivery(response, self._deliveries, reader, call) if batch.end > batch.start else response


async def _unless_deadline_is_near(context: Context) -> None:
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s < DEADLINE_MARGIN_S:
        await asyncio.get_running_loop().create_future()  # gRPC cancels the call when its time is up


def _is_over(batch: Batch | None) -> bool:
    if batch is None:
        return False
    return batch.outcome != "ok" or (batch.status != 0 and batch.end == batch.start)


def _cursor_of(context: Context) -> int:
    return answers.number_of(context, metadata.CURSOR, 0, MAX_CURSOR) or 0


def _elements(uuid: str, batch: Batch, context: Context, trailing: Pairs = ()) -> pb.GeneratedElements:
    if batch.outcome != "ok":
        raise Gone(uuid, batch.outcome)
    if batch.status:
        trailing += answers.of_end(batch.status, batch.reason, batch.message)
    if trailing:
        context.set_trailing_metadata(trailing)
    elements = pb.GeneratedElements(ids_from_generate=batch.tokens)
    elements.tensors_from_model_inference.SetInParent()
    found = elements.tensors_from_model_inference.tensor_map
    for name, data in batch.tensors:
        tensor = pb.Tensor.FromString(data)
        if name in found and tensor.data_type == pb.STRING:  # text comes in pieces, one for each record
            found[name].data += tensor.data
        else:
            found[name].CopyFrom(tensor)
    return elements


def nothing(_: pb.UUID) -> pb.GeneratedElements:
    """The answer for a uuid of which there is nothing to read."""
    elements = pb.GeneratedElements(empty=1)
    elements.tensors_from_model_inference.SetInParent()
    return elements


def interrupted(_: pb.UUID) -> pb.GenerateRequestStatus:
    """The status of a uuid of which there is nothing to read: terminal, so that no loop waits for it."""
    return pb.GenerateRequestStatus(status=pb.GenerateInterrupted)
