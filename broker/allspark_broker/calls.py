"""One envelope in, one reply out: which call goes where, and how errors become replies (R14)."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable

from allspark_bus.catalogue import ModelState
from allspark_bus.errors import (
    BrokerUnavailable,
    Denied,
    FleetError,
    MalformedMessage,
    ParamError,
    StoreUnavailable,
)
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto.version import VERSION
from google.protobuf.message import Message
from redis.exceptions import OutOfMemoryError, RedisError

from allspark_broker.build import model_information
from allspark_broker.dispatcher import Dispatcher
from allspark_broker.fleet_view import EngineStats, fleet_status
from allspark_broker.lifecycle import Lifecycle
from allspark_broker.requests import Requests
from allspark_broker.room import QueueFull
from allspark_broker.tenant_view import tenant_status
from allspark_broker.workers import Worker, WorkerTable

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
DEFAULT_TENANT = "default"
MAX_PRIORITY = 100
MAX_TEXT = 4096  # characters of a name or path: a longer one names nothing
CONTROL_TIMEOUT_S = 5.0
UNAVAILABLE_RETRY_MS = 1000
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")

Handler = Callable[[fleet.Envelope], Awaitable[fleet.Reply]]
Control = Callable[[str, fleet.ControlCall], Awaitable[fleet.ControlReply]]


class Calls:
    """Executes envelopes. `control` asks one worker; `shut_down` stops the fleet."""

    def __init__(
        self,
        requests: Requests,
        lifecycle: Lifecycle,
        dispatcher: Dispatcher,
        table: WorkerTable,
        stats: EngineStats,
        control: Control,
        shut_down: Callable[[], Awaitable[None]],
    ) -> None:
        self._requests = requests
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._table = table
        self._stats = stats
        self._control = control
        self._shut_down = shut_down
        self.check: Callable[[], None] = lambda: None  # raises if no call is to be served now
        self._handlers: dict[str, Handler] = {
            "start_request": requests.start,
            "stop_request": lambda e: requests.stop(e.stop_request, e.tenant),
            "release_request": lambda e: requests.release(e.release_request, e.tenant),
            "build_model": lambda e: self._done(lifecycle.build(e.build_model, e.tenant)),
            "start_model": self._start_model,
            "stop_model": lambda e: self._done(lifecycle.stop(e.stop_model.model_name, e.tenant)),
            "release_model": self._release_model,
            "unload_model": lambda e: self._done(lifecycle.unload(e.unload_model.model_name)),
            "reload_model": lambda e: self._done(lifecycle.reload(e.reload_model.model_name)),
            "get_engine_stat": self._engine_stat,
            "get_model_information": self._model_information,
            "get_op_profiling_info": self._op_profiling_info,
            "get_file_information": self._file_information,
            "get_rank_nums": self._rank_nums,
            "shutdown_service": self._shutdown_service,
            "get_fleet_status": self._fleet_status,
        }

    async def execute(self, envelope: fleet.Envelope) -> fleet.Reply:
        """The reply to an envelope; never raises."""
        name = envelope.WhichOneof("call")
        try:
            check_envelope(envelope)
            if name is None:
                raise MalformedMessage("the envelope has no call that this broker knows")
            self.check()
            reply = await self._handlers[name](envelope)
        except FleetError as e:
            reply = failure(e)
            reply.uuid = _uuid_of(envelope)
        except RedisError as e:
            log.error("call %s (uuid %r): Redis refused it: %s", name, _uuid_of(envelope), e)
            reply = failure(_of_redis(e))
            reply.uuid = _uuid_of(envelope)
        except Exception as e:
            log.exception("call %s (uuid %r) failed", name, _uuid_of(envelope))
            reply = fleet.Reply(as_status=pb.ALLSPARK_UNKNOWN_ERROR, reason=f"internal error: {e!r}")
            reply.uuid = _uuid_of(envelope)
        reply.correlation_id = envelope.correlation_id
        return reply

    async def _done(self, work: Awaitable[None]) -> fleet.Reply:
        await work
        return fleet.Reply()

    async def _start_model(self, envelope: fleet.Envelope) -> fleet.Reply:
        """Figures are those since StartModel, also those that are kept of workers that are gone."""
        name = envelope.start_model.model_name
        record = self._lifecycle.models.get(name)
        if record is None or record.state is not ModelState.RUNNING:
            self._stats.forget(name)
        return await self._done(self._lifecycle.start(name))

    async def _release_model(self, envelope: fleet.Envelope) -> fleet.Reply:
        name = envelope.release_model.model_name
        await self._lifecycle.release(name)
        self._stats.forget(name)
        return fleet.Reply()

    async def _engine_stat(self, envelope: fleet.Envelope) -> fleet.Reply:
        name = envelope.get_engine_stat.model_name
        workers = [w for w in self._table if name in w.models]
        await asyncio.gather(*[self._refresh_stat(w, name) for w in workers])
        queued = len(self._dispatcher.queues[name]) if name in self._dispatcher.queues else 0
        return fleet.Reply(engine_stat=self._stats.of(name, self._table, queued))

    async def _refresh_stat(self, worker: Worker, name: str) -> None:
        """Asks a worker for its figures now; one that does not answer keeps those of its last heartbeat."""
        call = fleet.ControlCall(get_engine_stat=pb.ModelName(model_name=name))
        try:
            answer = await self._control(worker.worker_id, call)
        except BrokerUnavailable as e:
            log.warning("statistics of model %r are as of the last heartbeat: %s", name, e.reason)
            return
        if name in worker.models:
            worker.models[name].stat.CopyFrom(answer.engine_stat)

    async def _model_information(self, envelope: fleet.Envelope) -> fleet.Reply:
        name = envelope.get_model_information.model_name
        await self._lifecycle.refresh()  # another broker may have built or released it just now
        record = self._lifecycle.models.get(name)
        text = ""
        if record is not None and record.is_built:
            facts = record.model_facts()
            text = model_information(facts.model_type, facts.device)
        return fleet.Reply(model_information=pb.ModelInfo(model_info=text))

    async def _op_profiling_info(self, envelope: fleet.Envelope) -> fleet.Reply:
        name = envelope.get_op_profiling_info.model_name
        workers = [w.worker_id for w in self._table if name in w.models]
        call = fleet.ControlCall(get_op_profiling_info=pb.ModelName(model_name=name))
        replies = await asyncio.gather(*[self._control(w, call) for w in workers])
        text = "".join(r.op_profiling_info.op_profiling_info for r in replies)
        return fleet.Reply(op_profiling_info=pb.OpProfilingInfo(op_profiling_info=text))

    async def _file_information(self, envelope: fleet.Envelope) -> fleet.Reply:
        """Files lie where the workers are; without one only the engine's version is known."""
        nothing = pb.FileInformationResponse(current_version_engine=VERSION)
        worker = next(iter(self._table), None)
        if worker is None:
            return fleet.Reply(file_information=nothing, reason="no worker is connected to read the file")
        call = fleet.ControlCall(get_file_information=envelope.get_file_information)
        answer = await self._control(worker.worker_id, call)
        return fleet.Reply(file_information=answer.file_information, reason=answer.reason)

    async def _rank_nums(self, envelope: fleet.Envelope) -> fleet.Reply:
        await self._lifecycle.refresh()  # as above
        built = any(r.is_built and envelope.tenant in r.owners for r in self._lifecycle.models.values())
        return fleet.Reply(rank_nums=pb.RankId(rank_id=1 if built else 0))

    async def _shutdown_service(self, envelope: fleet.Envelope) -> fleet.Reply:
        await self._requests.release_all(envelope.tenant)
        await self._lifecycle.disown(envelope.tenant)
        if envelope.may_shutdown:
            await self._shut_down()
        return fleet.Reply()

    async def _fleet_status(self, envelope: fleet.Envelope) -> fleet.Reply:
        status = fleet_status(self._lifecycle.models, self._table, self._dispatcher.queues, time.monotonic)
        status.accepted_total = self._requests.accepted_total
        status.denied_total = self._requests.denied_total
        if envelope.get_fleet_status.with_tenants:
            only = envelope.tenant if envelope.get_fleet_status.own_tenant_only else ""
            queues, limits = self._dispatcher.queues, self._requests.limits
            status.tenants.extend(await tenant_status(queues, self._table, limits, only))
        return fleet.Reply(fleet_status=status)


class Controls:
    """Calls to one worker that wait for its answer."""

    def __init__(self, send: Callable[[str, fleet.ToWorker], Awaitable[bool]]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[fleet.ControlReply]] = {}
        self._serial = 0

    async def call(self, worker_id: str, call: fleet.ControlCall) -> fleet.ControlReply:
        """Raises BrokerUnavailable when the worker does not answer in time."""
        self._serial += 1
        message = fleet.ToWorker(control=call)
        message.control.correlation_id = str(self._serial)
        future: asyncio.Future[fleet.ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[str(self._serial)] = future
        key = str(self._serial)
        try:
            if not await self._send(worker_id, message):
                raise BrokerUnavailable(f"worker {worker_id} is not connected")
            return await asyncio.wait_for(future, CONTROL_TIMEOUT_S)
        except TimeoutError:
            raise BrokerUnavailable(f"worker {worker_id} did not answer in {CONTROL_TIMEOUT_S:g} s") from None
        finally:
            del self._waiting[key]

    def answer(self, reply: fleet.ControlReply) -> None:
        """Hands an answer to whoever waits for it."""
        future = self._waiting.get(reply.correlation_id)
        if future is not None and not future.done():
            future.set_result(reply)


def check_envelope(envelope: fleet.Envelope) -> None:
    """Fills in the default tenant; raises for fields outside their range."""
    if envelope.version != PROTOCOL_VERSION:
        raise MalformedMessage(
            f"envelope version {envelope.version} is not known; this broker speaks {PROTOCOL_VERSION}"
        )
    envelope.tenant = envelope.tenant or DEFAULT_TENANT
    if not _TENANT.match(envelope.tenant):
        raise ParamError("tenant must be 1 to 64 characters of A-Z a-z 0-9 _ . -")
    if len(envelope.correlation_id) > 64:
        raise ParamError("correlation_id is longer than 64 bytes")
    if abs(envelope.priority) > MAX_PRIORITY:
        raise ParamError(f"priority {envelope.priority} is outside [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    if name := envelope.WhichOneof("call"):
        _check_texts(getattr(envelope, name))


def _check_texts(call: Message) -> None:
    """Names and paths of a call; uuids have their own limit."""
    for field, value in call.ListFields():
        if isinstance(value, str) and field.name != "uuid" and len(value) > MAX_TEXT:
            raise ParamError(f"{field.name} has {len(value)} characters, the limit is {MAX_TEXT}")


def _uuid_of(envelope: fleet.Envelope) -> str:
    name = envelope.WhichOneof("call")
    if name == "start_request":
        return envelope.start_request.config.uuid
    if name in ("stop_request", "release_request"):
        return str(getattr(envelope, name).uuid)
    return ""


def failure(e: FleetError) -> fleet.Reply:
    """The reply of a call that failed. An outage is no decision: the client may send the call again."""
    reply = fleet.Reply(as_status=e.status, reason=e.reason, retry_after_ms=e.retry_after_ms)
    if isinstance(e, QueueFull):
        reply.full_for_ms = e.full_for_ms
    if isinstance(e, StoreUnavailable | BrokerUnavailable):
        reply.unavailable = True
        reply.retry_after_ms = e.retry_after_ms or UNAVAILABLE_RETRY_MS
    return reply


def _of_redis(e: RedisError) -> FleetError:
    if str(e).startswith("OOM") or isinstance(e, OutOfMemoryError):
        return Denied(
            "the memory of Redis is full: release results that were read, or raise its maxmemory",
            retry_after_ms=UNAVAILABLE_RETRY_MS,
        )
    return StoreUnavailable(f"Redis refused a command: {e}")


def denied_busy(correlation_id: str, what: str) -> fleet.Reply:
    """The answer when too many calls are in progress."""
    reply = failure(Denied(f"{what} are in progress already", retry_after_ms=500))
    reply.correlation_id = correlation_id
    return reply
