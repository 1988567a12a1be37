"""What the key of a peer allows: gateways speak for all tenants, producers for one."""

import logging
from collections.abc import Sequence

import zmq
import zmq.asyncio
from allspark_bus.curve import AllowList, Doorkeeper, Peer, Role, ServerKeys, key_of
from allspark_bus.errors import FleetError
from allspark_bus.sparse_log import SparseLog
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_broker.settings import BrokerSettings

log = logging.getLogger(__name__)

FRONTEND, BACKEND = "frontend", "backend"
DOORS = {FRONTEND: {Role.GATEWAY, Role.PRODUCER}, BACKEND: {Role.WORKER}}
#: Calls of an envelope that a producer may make: its requests, and what is running.
PRODUCER_CALLS = frozenset(
    {
        *("start_request", "stop_request", "release_request"),
        *("get_engine_stat", "get_model_information", "get_fleet_status"),
    }
)


class NotAllowed(FleetError):
    """The key of the peer does not allow this call."""

    status = pb.ALLSPARK_INVALID_CALL_ERROR


class Access:
    """The keys of a broker. Without a directory nothing is asked and nothing is encrypted."""

    def __init__(self, settings: BrokerSettings, context: zmq.asyncio.Context) -> None:
        self.keys: ServerKeys | None = None
        self._allowed: AllowList | None = None
        self._doorkeeper: Doorkeeper | None = None
        self._passed_over = SparseLog(log)
        if settings.curve is not None:
            self.keys = ServerKeys.read(settings.curve)
            self._allowed = AllowList(settings.curve)
            self._doorkeeper = Doorkeeper(context, self._allowed, DOORS)
            self._doorkeeper.start()

    async def receive(self, socket: zmq.asyncio.Socket, door: str) -> tuple[list[bytes], Peer | None]:
        """The next message, and whose it is (None without CURVE).

        A key that was removed after its connection was made is a dead peer: its messages are passed over, so
        a worker's requests move on, and its call is never answered.
        """
        while self._allowed is not None:
            frames: Sequence[zmq.Frame] = await socket.recv_multipart(copy=False)
            key = key_of(frames[-1])
            peer = self._allowed.peer(key)
            if peer is not None and peer.role in DOORS[door]:
                return [frame.bytes for frame in frames], peer
            self._passed_over.warning(
                f"the {door} passes over messages of a key that was removed: {key.decode()}"
            )
        return await socket.recv_multipart(), None

    def close(self) -> None:
        """Admits nobody any more."""
        if self._doorkeeper is not None:
            self._doorkeeper.stop()


def authorize(envelope: fleet.Envelope, peer: Peer | None) -> None:
    """Raises NotAllowed for what a peer may not ask; a producer's calls are its tenant's."""
    if peer is None or peer.role is not Role.PRODUCER:
        return
    call = envelope.WhichOneof("call") or "nothing"
    if call not in PRODUCER_CALLS:
        raise NotAllowed(f"the key of producer {peer.name} does not allow {call}")
    if envelope.tenant not in ("", peer.name):
        raise NotAllowed(f"the key of producer {peer.name} is not one of tenant {envelope.tenant[:64]}")
    envelope.tenant = peer.name
    envelope.denied_before = 0  # gateways deny, and the sum is everybody's
    if call == "get_fleet_status":
        envelope.get_fleet_status.own_tenant_only = True
