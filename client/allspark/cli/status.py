"""``allspark status``: what is running, once; also the health check of containers."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from allspark_bus.broker_client import BrokerClient, raise_for
from allspark_bus.curve import ClientKeys
from allspark_bus.errors import FleetError
from allspark_proto import fleet_pb2 as fleet
from google.protobuf.json_format import MessageToDict
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from rich.table import Table

from allspark.cli.access import access_of, keys_of
from allspark.cli.console import err, out
from allspark.cli.settings import StatusSettings
from allspark.client import Access, AllSparkError, AsyncClient

# Field of the message -> heading.
_MODEL_COLUMNS = {"name": "model", "state": "state", "workers": "workers", "queued_requests": "waiting"}
_WORKER_COLUMNS = {
    "worker_id": "worker",
    "device": "device",
    "inflight_requests": "requests",
    "capacity": "capacity",
    "draining": "draining",
    "last_seen_s": "seen s ago",
    "store_silent_s": "store silent s",
}
_TENANT_COLUMNS = {
    "name": "tenant",
    "weight": "weight",
    "queued_requests": "waiting",
    "inflight_requests": "with workers",
    "open_requests": "counted",
    "max_requests": "limit",
    "open_tokens": "tokens",
    "max_tokens": "limit",
    "token_rate": "tokens/s",
}
_STAT_COLUMNS = {
    "model_name": "model",
    "running_request": "running",
    "pendding_request": "waiting",
    "generate_token_persec": "tokens/s",
    "process_token_persec": "prefill/s",
    "used_span": "used spans",
    "free_span": "free",
    "total_generated_token": "generated",
    "prefix_cache_hit_rate": "prefix hits",
}


def run(argv: Sequence[str]) -> int:
    """Show it; 0 if every address answered (and the expected worker is there), else 1."""
    settings = StatusSettings.load(argv)
    report = asyncio.run(collect(settings))
    if settings.as_json:
        out.print(json.dumps(report), markup=False, soft_wrap=True)
    else:
        show(report)
    problems = _problems(report, settings.expect_worker)
    for problem in problems:
        err.print(problem, style="red", markup=False, soft_wrap=True)
    return 1 if problems else 0


async def collect(settings: StatusSettings) -> dict[str, Any]:
    """What gateways and brokers say, as plain data."""
    addresses, limit_s = settings.gateways(), settings.timeout_s
    access, keys = access_of(settings, addresses), keys_of(settings.curve)
    gateways, brokers = await asyncio.gather(
        asyncio.gather(*(_ask_gateway(address, limit_s, access) for address in addresses)),
        asyncio.gather(*(_ask_broker(endpoint, limit_s, keys) for endpoint in settings.broker)),
    )
    listed = [model["name"] for broker in brokers for model in broker.get("models", ())]
    alive = [gateway["address"] for gateway in gateways if "error" not in gateway]
    names = list(dict.fromkeys([*settings.model, *listed]))
    stats = await _ask_stats(alive, names, limit_s, access) if alive else []
    return {"gateways": gateways, "brokers": brokers, "stats": stats}


async def _ask_gateway(address: str, timeout_s: float, access: Access) -> dict[str, Any]:
    async with AsyncClient(address, timeout_s=timeout_s, retry_s=timeout_s, access=access) as client:
        try:
            version = await client.version()
        except AllSparkError as error:
            return {"address": address, "error": str(error)}
    if not await _is_ready(address, timeout_s, access):
        reason = f"gateway {address} is not ready: it does not reach its broker or its store"
        return {"address": address, "version": version, "error": reason}
    return {"address": address, "version": version}


async def _is_ready(address: str, timeout_s: float, access: Access) -> bool:
    """What the gRPC health protocol says; a server that does not speak it is ready when it answers."""
    async with access.aio_channel(address, ()) as channel:
        stub: Any = HealthStub(channel)  # its published types know no methods
        try:
            reply = await stub.Check(HealthCheckRequest(), timeout=timeout_s, metadata=access.metadata())
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        return bool(reply.status == HealthCheckResponse.SERVING)


async def _ask_broker(endpoint: str, timeout_s: float, keys: ClientKeys | None) -> dict[str, Any]:
    client = BrokerClient([endpoint], keys=keys)
    try:
        envelope = fleet.Envelope(get_fleet_status=fleet.GetFleetStatus(with_tenants=True))
        status = raise_for(await client.call(envelope, timeout_s)).fleet_status
    except FleetError as error:
        return {"endpoint": endpoint, "error": error.reason}
    finally:
        await client.close()
    return {"endpoint": endpoint, **_to_dict(status)}


async def _ask_stats(
    addresses: Sequence[str], names: Sequence[str], timeout_s: float, access: Access
) -> list[dict[str, Any]]:
    async with AsyncClient(addresses, timeout_s=timeout_s, retry_s=timeout_s, access=access) as client:
        return [_to_dict(await client.stat(name)) for name in names]


def _to_dict(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _problems(report: dict[str, Any], expected_worker: str) -> list[str]:
    parts = [*report["gateways"], *report["brokers"]]
    problems = [part["error"] for part in parts if "error" in part]
    workers = [worker["worker_id"] for broker in report["brokers"] for worker in broker.get("workers", ())]
    if expected_worker and not any(name.startswith(expected_worker) for name in workers):
        problems.append(
            f"no broker lists a worker {expected_worker}*; listed: {', '.join(workers) or 'none'}"
        )
    return problems


def show(report: dict[str, Any]) -> None:
    """The report as tables."""
    for gateway in report["gateways"]:
        if "error" not in gateway:
            out.print(f"gateway {gateway['address']}  {gateway['version']}", markup=False)
    for broker in report["brokers"]:
        if "error" in broker:
            continue
        waiting, running = broker["queued_requests"], broker["inflight_requests"]
        out.print(f"broker {broker['endpoint']}  {waiting} waiting, {running} with workers", markup=False)
        out.print(_table(broker["models"], _MODEL_COLUMNS))
        out.print(_table(broker["workers"], _WORKER_COLUMNS))
        if broker["tenants"]:
            out.print(_table(broker["tenants"], _TENANT_COLUMNS))
    if report["stats"]:
        out.print(_table(report["stats"], _STAT_COLUMNS))


def _table(rows: Sequence[dict[str, Any]], columns: Mapping[str, str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in columns.values():
        table.add_column(heading)
    for row in rows:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    return table


def _cell(column: str, value: object) -> str:
    if column.endswith("_rate"):
        return f"{value:.0%}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
