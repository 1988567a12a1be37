"""Connections to one server, to the master that Sentinels name, or to one node of a cluster."""

from collections.abc import Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from allspark_bus.redis_url import Address, Target

CONNECT_TIMEOUT_S = 5.0
#: A dead Sentinel, or a node that is only asked for the map, shall not be waited for long.
ASK_TIMEOUT_S = 1.0

#: Makes a connection that is not connected yet.
NewConnection = Callable[[], AbstractConnection]


def single(target: Target) -> NewConnection:
    """To the server of a URL."""
    return _maker(ConnectionPool(**_common(target, CONNECT_TIMEOUT_S)))


def to(target: Target, address: Address, *, timeout_s: float = CONNECT_TIMEOUT_S) -> NewConnection:
    """To one server of several that share a login."""
    host, port = address
    return _maker(ConnectionPool(**_common(target, timeout_s) | {"host": host, "port": port}))


class _Sentinels(Sentinel):
    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except MasterNotFoundError:  # its text has every setting of every connection
            raise MasterNotFoundError(
                f"no Sentinel answers that knows a master {service_name!r} which is up"
            ) from None


class MasterOf:
    """Connections to whatever server is the master; the Sentinels are asked at every connect."""

    def __init__(self, target: Target) -> None:
        arguments = _common(target, CONNECT_TIMEOUT_S)
        kind = arguments.pop("connection_class", Connection)
        arguments["ssl"] = is_tls = kind is not Connection
        self._sentinels = _Sentinels(
            target.addresses,
            sentinel_kwargs={
                "socket_connect_timeout": ASK_TIMEOUT_S,
                "socket_timeout": ASK_TIMEOUT_S,
                "retry": Retry(NoBackoff(), 0),  # type: ignore[no-untyped-call]
                "protocol": 2,
                "ssl": is_tls,
                **target.sentinel_arguments,
            },
        )
        self._service = target.service
        self.new_connection = _maker(
            SentinelConnectionPool(target.service, self._sentinels, **arguments)  # type: ignore[no-untyped-call]
        )

    async def address(self) -> str:
        """HOST:PORT of the master. Raises ConnectionError: no Sentinel that answers knows one."""
        host, port = await self._sentinels.discover_master(self._service)
        return f"{host}:{port}"

    async def close(self) -> None:
        """Ends the connections to the Sentinels."""
        await self._sentinels.aclose()


def _common(target: Target, timeout_s: float) -> dict[str, Any]:
    rest: dict[str, Any] = {"socket_connect_timeout": timeout_s, "socket_timeout": None, "protocol": 2}
    return target.arguments | rest


def _maker(pool: ConnectionPool) -> NewConnection:
    def new_connection() -> AbstractConnection:
        connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    return new_connection
