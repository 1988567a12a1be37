"""The gateway process: listeners, one Redis connection and one subscription, one socket to each broker."""

import asyncio
import contextlib
import json
import logging
import os
import signal

import grpc
import uvloop
from allspark_bus import vitals
from allspark_bus.broker_client import BrokerClient
from allspark_bus.curve import ClientKeys
from allspark_bus.ledger import Ledger, Ttl
from allspark_bus.store import Store
from allspark_bus.streams import Streams
from allspark_bus.wakeups import Wakeups

from allspark_gateway import library_log
from allspark_gateway.arrivals import Arrivals
from allspark_gateway.calls import FleetCalls
from allspark_gateway.deliveries import Deliveries
from allspark_gateway.denials import Denials
from allspark_gateway.guard import Guard
from allspark_gateway.listeners import UNIX, Listener, ListenError, tenant_of
from allspark_gateway.readers import Readers
from allspark_gateway.readiness import Readiness
from allspark_gateway.results import Results
from allspark_gateway.service import GatewayLeaves, InFlight, Service
from allspark_gateway.settings import GatewaySettings
from allspark_gateway.store_doubt import StoreDoubt
from allspark_gateway.sync import Sync
from allspark_gateway.tokens import TokenFileError, Tokens
from allspark_gateway.unsent import Unsent

log = logging.getLogger(__name__)

PARKED_GRACE_S = 0.5  # after SIGTERM, for tokens that are on their way to a parked Get
LAST_WRITES_S = 0.25  # for the answers of calls that just ended


class Gateway:
    """Wires the parts; `serve` runs until `stop`."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._store = Store(settings.redis, patience_s=settings.call_timeout_s)
        self._wakeups = Wakeups(self._store)
        keys = ClientKeys.read(settings.curve) if settings.curve else None
        self._arrivals = Arrivals()
        self._broker = BrokerClient(
            settings.broker,
            max_calls=settings.max_calls,
            max_message_bytes=int(settings.max_message_bytes),
            keys=keys,
            sent_ms=self._arrivals.sent_ms,
        )
        self._streams = Streams(self._store, reservation_ms=int(settings.redelivery_s * 1000))
        self._readers = Readers(self._wakeups, settings.gather_s)
        self._deliveries = Deliveries(self._streams)
        self._unsent = Unsent()
        self._ledger = Ledger(self._store, Ttl())
        self._denials = Denials()
        self._in_flight = InFlight()
        self._doubt = StoreDoubt()
        self._readiness = Readiness(
            self._store,
            self._broker,
            give_up_s=settings.call_timeout_s,
            on_store_lost=self._readers.interrupt,
            on_store_doubt=self._doubt.tell,
        )
        self.listeners = [Listener(address, settings) for address in settings.grpc]
        self._stopped = asyncio.Event()

    async def open(self) -> None:
        """Begins to serve; raises ListenError."""
        library_log.watch()
        tokens = self._read_tokens()
        for listener in self.listeners:
            listener.server.add_generic_rpc_handlers(self._handlers(listener.address, tokens))
        for listener in self.listeners:
            await listener.open()
        await self._readiness.start()
        self._arrivals.start()

    def _read_tokens(self) -> Tokens | None:
        try:
            return Tokens(self._settings.tokens) if self._settings.tokens else None
        except TokenFileError as e:
            raise ListenError(str(e)) from e

    def _handlers(self, address: str, tokens: Tokens | None) -> tuple[grpc.GenericRpcHandler, ...]:
        """What an address serves; with tokens the tenant is that of the token, not of the listener."""
        may_shutdown = address in self._settings.allow_shutdown
        health = self._readiness.handler()
        if tokens is None or address.startswith(UNIX):
            return self._service(tenant_of(address), may_shutdown), health
        return (Guard(tokens, self._service, health, may_shutdown=may_shutdown),)

    def _service(self, tenant: str, may_shutdown: bool) -> Service:
        calls = FleetCalls(
            self._broker, self._ledger, self._denials, self._settings, tenant, may_shutdown=may_shutdown
        )
        results = Results(
            self._streams, self._readers, self._deliveries, self._unsent, self._settings, tenant, self._doubt
        )
        sync = Sync(self._streams, self._readers, self._ledger, results, tenant)
        return Service(calls, results, sync, self._in_flight)

    def stop(self) -> None:
        """Ends `wait`."""
        self._stopped.set()

    async def wait(self) -> None:
        """Returns when the gateway should end; raises if a listener broke."""
        stopped = asyncio.ensure_future(self._stopped.wait())
        # Not cancelled afterwards: that would cancel the server's own future. They end with the servers.
        broken = [asyncio.ensure_future(one.server.wait_for_termination()) for one in self.listeners]
        done, _ = await asyncio.wait([stopped, *broken], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in done:
            task.result()

    async def close(self) -> None:
        """No new calls; parked ones are told to go elsewhere, the others may finish within `drain_s`."""
        self._arrivals.stop()
        await self._readiness.stop()
        drain_s = self._settings.drain_s
        stopping = [asyncio.create_task(listener.stop(drain_s)) for listener in self.listeners]
        grace_s = min(PARKED_GRACE_S, drain_s / 2)
        if not await self._in_flight.is_idle_within(grace_s):
            leaves = GatewayLeaves("this gateway shuts down: ask again, or another one; nothing is lost")
            self._readers.interrupt(leaves, for_good=True)
            if not await self._in_flight.is_idle_within(drain_s - grace_s):
                log.warning("calls still in progress after %g s are cut off", drain_s)
        await asyncio.gather(*[listener.stop(LAST_WRITES_S) for listener in self.listeners])
        await asyncio.gather(*stopping)
        await self._deliveries.flush()
        await self._readers.close()
        await self._wakeups.close()
        await self._broker.close()
        await self._store.close()


async def serve(settings: GatewaySettings) -> int:
    """Runs a gateway until SIGTERM or SIGINT."""
    gateway = Gateway(settings)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, gateway.stop)
    vitals.listen(loop)
    try:
        await gateway.open()
        bound = [listener.bound for listener in gateway.listeners]
        log.info("serving gRPC on %s", ", ".join(bound))
        if settings.ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(settings.ready_fd, json.dumps({"grpc": bound}).encode() + b"\n")
        await gateway.wait()
    except ListenError as e:
        log.error("%s", e)
        return 1
    finally:
        await gateway.close()
    return 0


def main(settings: GatewaySettings) -> int:
    """Entry point of `allspark gateway`."""
    return uvloop.run(serve(settings))
