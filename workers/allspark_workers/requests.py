"""Requests on this worker: taking dispatches, cancelling, handing back, telling brokers how it ended."""

import logging
from collections.abc import Awaitable, Callable

from allspark_bus.errors import Damaged, FleetError
from allspark_bus.ledger import Ending, Ledger
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_workers.convert import ending_of, engine_request
from allspark_workers.engine.types import FinishReason, StepOutput
from allspark_workers.guided.errors import GuideError
from allspark_workers.guided.guides import Guides
from allspark_workers.hosted import HostedModel
from allspark_workers.ports import EnginePort
from allspark_workers.publisher import Publication, Publisher
from allspark_workers.texts import Texts

log = logging.getLogger(__name__)

Send = Callable[..., Awaitable[None]]


class Requests:
    """`find(model)` is the running model or None; `guides` compiles what requests ask their text to be;
    `max_queue` bounds what this worker holds.
    """

    def __init__(
        self,
        ledger: Ledger,
        publisher: Publisher,
        find: Callable[[str], HostedModel | None],
        guides: Guides,
        texts: Texts,
        max_queue: int,
    ) -> None:
        self._ledger = ledger
        self._publisher = publisher
        self._find = find
        self._guides = guides
        self._texts = texts
        self._max_queue = max_queue
        self.is_draining = False

    def held(self) -> list[fleet.HeldRequest]:
        """What an announcement lists."""
        return [
            fleet.HeldRequest(request_id=p.request_id, epoch=p.epoch, model=p.model)
            for p in self._publisher.publications()
            if not p.is_cancelled
        ]

    async def dispatch(self, d: fleet.Dispatch, send: Send, send_all: Send) -> None:
        """Accepts a dispatch and submits it, or refuses it with the reason.

        Every broker hears what was accepted, or each would fill this worker by itself; `send` is to the one
        that sent the dispatch.
        """
        known = self._publisher.get(d.request_id)
        accepted = fleet.Accepted(request_id=d.request_id, epoch=d.epoch, model=d.request.model_name)
        if known is not None and known.epoch == d.epoch and not known.is_cancelled:
            await send_all(accepted=accepted)
            return
        hosted = self._find(d.request.model_name)
        refusal = self._refusal(d, hosted, known)
        if refusal or hosted is None:
            await send(refused=fleet.Refused(request_id=d.request_id, epoch=d.epoch, reason=refusal))
            return
        config = d.request.config
        publication = Publication(
            d.request_id,
            d.request.model_name,
            d.epoch,
            hosted.engine,
            first_count=max(1, config.first_token_num),
            later_count=max(1, config.async_token_num),
        )
        self._publisher.open(publication)
        await send_all(accepted=accepted)
        await self._submit(publication, d, hosted, send_all)

    def _refusal(self, d: fleet.Dispatch, hosted: HostedModel | None, known: Publication | None) -> str:
        if self.is_draining:
            return "the worker is draining"
        if hosted is None:
            return f"model {d.request.model_name!r} is not running here"
        if known is not None:
            # The engine knows requests by id: an older attempt has to leave before a newer one enters.
            self._publisher.cancel(d.request_id)
            return "an earlier attempt is still leaving this worker"
        if len(self._publisher) >= self._max_queue:
            return f"the worker holds {self._max_queue} requests already"
        return ""

    async def _submit(
        self, publication: Publication, d: fleet.Dispatch, hosted: HostedModel, send: Send
    ) -> None:
        rid = publication.request_id
        try:
            generated = await self._ledger.tokens(rid) if d.resume else []
            publication.tokens, publication.published = list(generated), len(generated)
            publication.text = await self._texts.pieces(d.request, hosted.engine.facts, generated)
            guide = await self._guides.prepare(d.request.config, hosted.engine.facts, generated)
            if publication.is_cancelled:
                self._publisher.add([StepOutput(rid, d.epoch, 0, [], FinishReason.STOPPED)])
                return
            if not hosted.is_running:  # it was stopped since the dispatch was accepted
                await self._hand_back(publication, send)
                return
            hosted.engine.submit(engine_request(d, generated, hosted.engine.facts, guide))
        except Damaged as e:
            # Of what was generated before: nothing can be appended to it, the ending included.
            await self._ledger.condemn(rid, e.reason)
            self._publisher.abandon(publication)
        except GuideError as e:
            log.warning("request %s cannot be guided: %s", rid, e)
            self._fail(publication, ending_of(FinishReason.GRAMMAR, str(e)))
        except (ValueError, FleetError) as e:
            reason = e.reason if isinstance(e, FleetError) else str(e)
            log.warning("request %s cannot run: %s", rid, reason)
            self._fail(publication, Ending(pb.GenerateInterrupted, "error", reason))
        except Exception as e:
            # It was accepted, so it must end, whatever is wrong with it or with this code.
            log.exception("request %s cannot run", rid)
            self._fail(publication, Ending(pb.GenerateInterrupted, "error", f"internal error: {e!r}"))

    def _fail(self, publication: Publication, ending: Ending) -> None:
        """The engine will never hear of this request."""
        if publication.is_cancelled:  # meanwhile, and whoever did that has moved or ended it
            stopped = StepOutput(publication.request_id, publication.epoch, 0, [], FinishReason.STOPPED)
            self._publisher.add([stopped])
        else:
            self._publisher.fail(publication, ending)

    def cancel(self, rid: str) -> None:
        """The request ended elsewhere."""
        self._publisher.cancel(rid)

    async def hand_back(self, send_all: Send, *, begun: bool, reason: str) -> None:
        """Gives requests back to the broker: all, or only those without a token yet."""
        for p in self._publisher.publications():
            if p.is_cancelled or p.ending is not None or (p.tokens and not begun):
                continue
            self._publisher.cancel(p.request_id)
            await send_all(refused=fleet.Refused(request_id=p.request_id, epoch=p.epoch, reason=reason))

    async def engine_stopped(self, engine: EnginePort, send_all: Send) -> None:
        """Lets go of what a stopped engine had: it has forgotten its requests and will not end them."""
        for p in self._publisher.publications():
            if p.engine is engine and p.ending is None:
                await self._hand_back(p, send_all)

    async def _hand_back(self, p: Publication, send: Send) -> None:
        """First handed back, then closed: a request that is still open goes on elsewhere, or waits."""
        reason = f"model {p.model!r} was stopped here"
        await send(refused=fleet.Refused(request_id=p.request_id, epoch=p.epoch, reason=reason))
        self._publisher.abandon(p)
