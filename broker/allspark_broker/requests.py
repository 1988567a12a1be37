"""StartRequest, StopRequest and ReleaseRequest (spec 1.4.9 - 1.4.11)."""

import logging
from dataclasses import replace

from allspark_bus import keys, response_format, rich_text, text_inputs
from allspark_bus.errors import (
    Damaged,
    Denied,
    FleetError,
    ParamError,
    StoreUnavailable,
    UnknownRequest,
)
from allspark_bus.ledger import Ending, Entry, Ledger, now_ms
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from redis.exceptions import OutOfMemoryError

from allspark_broker import admission, room
from allspark_broker.dispatcher import Dispatcher
from allspark_broker.lifecycle import Lifecycle
from allspark_broker.limits import Limits
from allspark_broker.texts import Texts
from allspark_broker.worker_checks import WorkerChecks

log = logging.getLogger(__name__)

LATE_RETRY_MS = 100
_USED_TENSORS = frozenset({"input_ids", "attention_mask", "hash_input"})
_TEXT_TENSORS = text_inputs.NAMES


def first_epoch() -> int:
    """The epoch that a request begins with: the time in seconds.

    So it is above every epoch that an earlier request of the same uuid had, long after its tombstone is gone:
    a worker that slept all the while holds such an epoch, and must not append to this one.
    """
    return now_ms() // 1000


class Requests:
    """Admission, and ending requests from outside."""

    def __init__(
        self,
        ledger: Ledger,
        dispatcher: Dispatcher,
        lifecycle: Lifecycle,
        checks: WorkerChecks,
        texts: Texts,
        limits: Limits,
        max_uuid_bytes: int,
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._checks = checks
        self._texts = texts
        self.limits = limits
        self._max_uuid_bytes = max_uuid_bytes
        self.accepted_total = 0
        self.denied_total = 0

    async def start(self, envelope: fleet.Envelope) -> fleet.Reply:
        """Checks and records a request, then dispatches or queues it; the answer does not wait for that."""
        self.denied_total += envelope.denied_before
        request = envelope.start_request
        uuid = request.config.uuid
        admission.check_uuid(uuid, self._max_uuid_bytes)
        rid = keys.request_id(envelope.tenant, uuid)
        digest = admission.digest(request)
        try:
            await self._lifecycle.make_sure(request.model_name)
            self._check_place(envelope)  # first: a full queue denies before anything is spent on the request
            if request.config.lora_name or request.config.response_format:
                await self._ask_worker(request)
            if text_inputs.is_text(request):
                await self._texts.put_ids(request, self._lifecycle.serving(request.model_name))
            self._check(request, envelope, rid)  # last: nothing may change between this and the reservation
            await self._record(envelope, rid, digest)
        except StoreUnavailable:
            raise
        except FleetError as e:
            # A retry of an accepted request gets its answer again, whatever has changed since.
            if await self._ledger.is_same(rid, digest):
                return fleet.Reply(uuid=uuid)
            self.denied_total += isinstance(e, Denied)
            raise
        return fleet.Reply(uuid=uuid)

    async def _ask_worker(self, request: pb.StartRequestRequest) -> None:
        config, record = request.config, self._lifecycle.serving(request.model_name)
        admission.check_adapter_name("lora_name", config.lora_name)
        document = response_format.check(config, record.model_facts().vocab_size)
        await self._checks.adapter(record, config.lora_name)
        await self._checks.document(record, document)

    def _check(self, request: pb.StartRequestRequest, envelope: fleet.Envelope, rid: str) -> None:
        record = self._lifecycle.serving(request.model_name)
        admission.check_request(request, record.model_facts())
        for key in request.inputs.tensor_map:
            is_used = key in _USED_TENSORS or (key in _TEXT_TENSORS and text_inputs.is_text(request))
            if not is_used and not rich_text.is_embedding(request, key):
                log.warning("request %s: input tensor %r is not used", rid, key)
        self._check_place(envelope)
        if envelope.deadline_unix_ms:
            work = self._dispatcher.work_of(request)
            outlook = self._dispatcher.outlook(record.name, envelope.tenant, envelope.priority, work)
            room.check_deadline(envelope, outlook, self._dispatcher.waits[record.name])

    def _check_place(self, envelope: fleet.Envelope) -> None:
        name = self._lifecycle.serving(envelope.start_request.model_name).name
        room.check_place(envelope, self._dispatcher.queues[name], self._dispatcher.waits[name])

    async def _record(self, envelope: fleet.Envelope, rid: str, digest: bytes) -> None:
        request = envelope.start_request
        if response_format.document(request.config.response_format) is None:
            request.config.ClearField("vocab")  # megabytes that nothing will read
        work = self._dispatcher.work_of(request)
        worker = self._dispatcher.reserve(request, rid, work)
        entry = Entry(
            rid,
            request.model_name,
            first_epoch(),
            worker.worker_id if worker else "",
            request.SerializeToString(),
            now_ms(),
            envelope.deadline_unix_ms,
            envelope.priority,
            0,
            0,
        )
        outcome, tag = "failed", ""
        generation = self._lifecycle.serving(request.model_name).generation
        try:
            tag = await self.limits.take(rid, work)
            admission = await self._ledger.admit(entry, digest, envelope.sent_unix_ms)
            if admission.outcome == "new" and admission.generation != generation:
                await self._check_again(envelope, rid, tag)
            outcome = admission.outcome
        except OutOfMemoryError:
            await self.limits.give_back(rid, tag)
            raise
        finally:
            if outcome != "new":
                self._dispatcher.give_up(worker, request.model_name, rid)
        if outcome != "new":
            await self.limits.give_back(rid, tag)
        if outcome == "late":
            raise Denied(
                f"uuid {request.config.uuid!r} was released after this call was sent: send it again",
                retry_after_ms=LATE_RETRY_MS,
            )
        if outcome == "conflict":
            raise ParamError(
                f"uuid {request.config.uuid!r} is in use by another request: "
                "choose another, or release that one"
            )
        if outcome == "new":
            self.accepted_total += 1
            await self._dispatcher.start(worker, replace(entry, epoch=admission.epoch), work)

    async def _check_again(self, envelope: fleet.Envelope, rid: str, tag: str) -> None:
        """For a request that was recorded after its model was changed, through another broker perhaps."""
        await self._lifecycle.refresh()
        try:
            self._check(envelope.start_request, envelope, rid)
        except FleetError:
            await self._ledger.release(rid)  # it was never accepted
            await self.limits.give_back(rid, tag)
            raise

    async def stop(self, call: pb.StopRequestRequest, tenant: str) -> fleet.Reply:
        """Ends a request; its tokens stay readable. Idempotent."""
        rid = keys.request_id(tenant, call.uuid)
        await self._check_model(call, rid)
        outcome, worker = await self._ledger.finish(rid, Ending(pb.GenerateFinished, "stopped"))
        if outcome == "unknown":
            raise UnknownRequest(f"uuid {call.uuid!r} is unknown")
        await self._dispatcher.cancel(rid, call.model_name, worker)
        return fleet.Reply(uuid=call.uuid)

    async def release(self, call: pb.StopRequestRequest, tenant: str) -> fleet.Reply:
        """Ends a request if needed and forgets it. Idempotent."""
        rid = keys.request_id(tenant, call.uuid)
        await self._check_model(call, rid)
        outcome, worker, was_open = await self._ledger.release(rid)
        if outcome == "unknown":
            raise UnknownRequest(f"uuid {call.uuid!r} is unknown")
        if was_open:
            await self._dispatcher.cancel(rid, call.model_name, worker)
        return fleet.Reply(uuid=call.uuid)

    async def _check_model(self, call: pb.StopRequestRequest, rid: str) -> None:
        """model_name is redundant: empty is accepted and filled in, a wrong one is an error."""
        try:
            admission.check_uuid(call.uuid, self._max_uuid_bytes)
        except ParamError as e:
            raise UnknownRequest(f"no request can have this uuid: {e.reason}") from e
        try:
            model = await self._ledger.model_of(rid)
        except Damaged as e:
            log.warning("request %s is ended without knowing its model: %s", rid, e.reason)
            return
        if model is None:
            return
        if call.model_name and call.model_name != model:
            raise ParamError(f"uuid {call.uuid!r} belongs to model {model!r}, not {call.model_name!r}")
        call.model_name = model

    async def release_all(self, tenant: str) -> None:
        """Ends and forgets everything a tenant has."""
        for rid in await self._ledger.tenant_requests(tenant):
            _, uuid = keys.split_request_id(rid)
            await self.release(pb.StopRequestRequest(uuid=uuid), tenant)
