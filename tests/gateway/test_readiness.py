"""Readiness by the gRPC health protocol: a gateway is ready while a request could be served (R13)."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from allspark_gateway import readiness
from allspark_gateway.main import Gateway
from allspark_proto import fleet_pb2 as fleet
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .conftest import Client, Gateways, ScriptedBroker

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "allspark.allspark_service.AllSpark"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "INTERVAL_S", 0.01)
    monkeypatch.setattr(readiness, "PATIENCE_S", 3.0)  # shorter than a test waits, longer than a stall


async def until(client: Client, status: int, service: str = "") -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    async for answer in health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60):
        if answer.status == status:
            return
    raise AssertionError("the watch ended")


async def check(client: Client, service: str = "") -> int:
    health = health_pb2_grpc.HealthStub(client.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return int(answer.status)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_it_is_ready_while_redis_and_broker_answer(client: Client, service: str) -> None:
    await until(client, SERVING, service)
    assert await check(client, service) == SERVING


async def test_it_is_not_ready_without_a_broker(
    client: Client, broker: ScriptedBroker, gateway: Gateway
) -> None:
    await until(client, SERVING)
    broker.scripts["get_fleet_status"] = lambda _: None
    await until(client, NOT_SERVING)
    assert not gateway._readiness.is_ready
    del broker.scripts["get_fleet_status"]
    await until(client, SERVING)


async def test_engine_died_and_probes_are_still_answered(client: Client, broker: ScriptedBroker) -> None:
    """Readiness falls while no worker runs what is started, and comes back with the first one."""

    def answer(**workers: int) -> None:
        status = fleet.FleetStatus()
        for name, count in workers.items():
            status.models.add(name=name, state="running" if name != "idle" else "built", workers=count)
        broker.scripts["get_fleet_status"] = lambda _: fleet.Reply(fleet_status=status)

    answer(m=1, other=1)
    await until(client, SERVING)
    answer(m=0, other=0)
    await until(client, NOT_SERVING)
    answer(m=0, other=1)
    await until(client, SERVING)
    answer(idle=0)
    await until(client, SERVING)


async def test_it_is_not_ready_without_redis(client: Client, valkey: Any) -> None:
    await until(client, SERVING)
    valkey.kill()
    await until(client, NOT_SERVING)
    valkey.start()
    await until(client, SERVING)


async def test_an_unknown_service_is_not_found(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await check(client, "other.Service")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_watch_does_not_hold_up_the_end(gateways: Gateways) -> None:
    gateway = await gateways.open(drain_s=600)
    health = health_pb2_grpc.HealthStub(gateways.client(gateway).channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=""))
    async for answer in watch:
        if answer.status == SERVING:
            break
    await asyncio.wait_for(gateway.close(), 60)
