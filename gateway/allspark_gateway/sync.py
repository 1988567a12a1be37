"""SyncRequest: waits for ends without holding anything but a future (spec 1.4.12)."""

import asyncio

from allspark_bus.errors import ParamError
from allspark_bus.ledger import Ledger
from allspark_bus.streams import Streams, View
from allspark_proto import allspark_service_pb2 as pb

from allspark_gateway.answers import Context, Gone
from allspark_gateway.readers import Readers
from allspark_gateway.results import ENDED, Results

VIEWS_AT_ONCE = 256


class Sync:
    """The waiting part of the service, for the callers of one listener."""

    def __init__(
        self, streams: Streams, readers: Readers, ledger: Ledger, results: Results, tenant: str
    ) -> None:
        self._streams = streams
        self._readers = readers
        self._ledger = ledger
        self._results = results
        self._tenant = tenant

    async def sync_request(self, request: pb.StopRequestRequest, context: Context) -> pb.StartRequestResponse:
        """Answers when the request has ended; with an empty uuid, when all that are live now have."""
        if request.uuid:
            await self._one(request.uuid, request.model_name)
        else:
            await self._all(request.model_name)
        return pb.StartRequestResponse(uuid=request.uuid)

    async def _one(self, uuid: str, model: str) -> None:
        rid = self._results.request_id(uuid)
        owner = await self._ledger.model_of(rid) if model else None
        if owner is not None and owner != model:
            raise ParamError(f"uuid {uuid!r} belongs to model {owner!r}, not {model!r}")
        if (await self._end_of(rid)).outcome == "unknown":
            raise Gone(uuid, "unknown")

    async def _all(self, model: str) -> None:
        """Those that are live at this moment, of one model if it is named."""
        live = await self._ledger.tenant_requests(self._tenant)
        if model:
            of_model = set(await self._ledger.open_requests(model))
            live = [rid for rid in live if rid in of_model]
        for i in range(0, len(live), VIEWS_AT_ONCE):
            part = live[i : i + VIEWS_AT_ONCE]
            views = await asyncio.gather(*[self._streams.view(rid) for rid in part])
            live[i : i + VIEWS_AT_ONCE] = [
                "" if _has_ended(v) else rid for rid, v in zip(part, views, strict=True)
            ]
        for rid in filter(None, live):  # one after another: the last end is the end of all
            await self._end_of(rid)

    async def _end_of(self, rid: str) -> View:
        reader = self._readers.enter(rid)
        view: View | None = None
        try:
            while True:
                endings = reader.endings
                view = await self._streams.view(rid)
                if _has_ended(view):
                    return view
                self._readers.check_open()
                reader.join()
                await reader.ended_since(endings)
        finally:
            self._readers.exit(reader, is_over=view is not None and view.outcome != "ok")


def _has_ended(view: View) -> bool:
    return view.outcome != "ok" or view.status in ENDED
