"""Readiness (R13): a gateway is ready while a request could be served; told by the gRPC health protocol."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
from allspark_bus.broker_client import BrokerClient
from allspark_bus.errors import FleetError, StoreUnavailable
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import OVERALL_HEALTH, SERVICE_NAME
from grpc_health.v1.health import aio as health_aio
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
PATIENCE_S = 2.0
DOUBT_S = 1.0  # of silence, from the first question that was not answered
SERVICES = (OVERALL_HEALTH, pb.DESCRIPTOR.services_by_name["AllSpark"].full_name)


def _without_workers(status: fleet.FleetStatus) -> str:
    """Why nothing that is started can be served; without a started model there is nothing to miss."""
    running = [model for model in status.models if model.state == "running"]
    if not running or any(model.workers for model in running):
        return ""
    return f"no worker runs {', '.join(model.name for model in running)}"


class Readiness:
    """Asks Redis and a broker every `INTERVAL_S`: do both answer, does a started model have a worker?

    When Redis has been away for `give_up_s`, `on_store_lost` is told, so that parked calls are answered;
    `on_store_doubt` is told every time whether it has been for `DOUBT_S`.
    """

    def __init__(
        self,
        store: Store,
        broker: BrokerClient,
        *,
        give_up_s: float,
        on_store_lost: Callable[[FleetError], None],
        on_store_doubt: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._broker = broker
        self._give_up_s = give_up_s
        self._on_store_lost = on_store_lost
        self._on_store_doubt = on_store_doubt
        self._health = health_aio.HealthServicer()
        self._task: asyncio.Task[None] | None = None
        self._store_lost_since_s: float | None = None
        self.is_ready = False

    def handler(self) -> grpc.GenericRpcHandler:
        """The health service; not the generated registration, see `service.Service`."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(
                    self._health.Check,
                    request_deserializer=health_pb2.HealthCheckRequest.FromString,
                    response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self._health.Watch,
                    request_deserializer=health_pb2.HealthCheckRequest.FromString,
                    response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
                ),
            },
        )

    async def start(self) -> None:
        """Begins to ask; not ready until the first answers."""
        await self._tell(False)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Not ready any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._tell(False)

    async def _run(self) -> None:
        while True:
            asked_s = asyncio.get_running_loop().time()
            problems = await asyncio.gather(self._ask_store(), self._ask_broker())
            self._watch_store(problems[0], asked_s)
            is_ready = not any(problems)
            if is_ready != self.is_ready:
                log.info("ready" if is_ready else f"not ready: {'; '.join(filter(None, problems))}")
                await self._tell(is_ready)
            await asyncio.sleep(INTERVAL_S)

    async def _ask_store(self) -> str:
        try:
            await asyncio.wait_for(self._store.ping(), PATIENCE_S)
        except (FleetError, RedisError, TimeoutError) as e:
            return f"Redis does not answer ({e or 'no reply in time'})"
        return ""

    async def _ask_broker(self) -> str:
        envelope = fleet.Envelope(get_fleet_status=fleet.GetFleetStatus())
        try:
            reply = await self._broker.call(envelope, PATIENCE_S)
        except FleetError as e:
            return e.reason
        return _without_workers(reply.fleet_status)

    def _watch_store(self, problem: str, asked_s: float) -> None:
        if not problem:
            self._store_lost_since_s = None
            self._on_store_doubt(False)
            return
        if self._store_lost_since_s is None:
            self._store_lost_since_s = asked_s
        now_s = asyncio.get_running_loop().time()
        self._on_store_doubt(now_s - self._store_lost_since_s >= DOUBT_S)
        if now_s - self._store_lost_since_s >= self._give_up_s:
            self._on_store_lost(StoreUnavailable(f"{problem}; nothing was lost, try again"))

    async def _tell(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        status = (
            health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in SERVICES:
            await self._health.set(service, status)
