"""The command line of each process of a fleet, from what is already bound.

A restarted process gets the addresses that its first incarnation bound, so the others find it again.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from allspark_bus import redis_url
from allspark_bus.setting_types import split_host_port

from allspark.launcher.ports import free_port

if TYPE_CHECKING:
    from allspark.launcher.fleet import Fleet

ALLSPARK = (sys.executable, "-m", "allspark.cli")


def broker_command(fleet: "Fleet", index: int, ready_fd: int) -> Sequence[str]:
    """``allspark broker`` on free loopback ports, or on those it had before."""
    bound = fleet.brokers[index].ready
    return [
        *ALLSPARK,
        "broker",
        *(f"--{door}={bound.get(door) or _any_port()}" for door in ("frontend", "backend")),
        *(f"--model-root={root}" for root in fleet.options.model_roots),
        *_common(fleet, "broker", ready_fd),
        *fleet.options.broker_args,
    ]


def gateway_command(fleet: "Fleet", index: int, ready_fd: int) -> Sequence[str]:
    """``allspark gateway`` on its addresses."""
    addresses = fleet.gateways[index].ready.get("grpc") or [
        _with_port(address) for address in fleet.options.gateway_addresses()[index]
    ]
    return [
        *ALLSPARK,
        "gateway",
        *(f"--grpc={address}" for address in addresses),
        *(f"--broker={endpoint}" for endpoint in fleet.frontends),
        *(fleet.secured.listener_flags(addresses) if fleet.secured else ()),
        *_common(fleet, "gateway", ready_fd),
        *fleet.options.gateway_args,
    ]


def worker_command(fleet: "Fleet", index: int, ready_fd: int) -> Sequence[str]:
    """``allspark worker``, or the command that stands in for it."""
    return [
        *fleet.options.worker_command,
        *(f"--broker={endpoint}" for endpoint in fleet.backends),
        f"--device={fleet.options.worker_device(index)}",
        f"--num-threads={fleet.options.worker_threads()}",
        *(f"--model-root={root}" for root in fleet.options.model_roots),
        *_common(fleet, "worker", ready_fd),
        *fleet.options.worker_args,
    ]


def _any_port() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def _with_port(address: str) -> str:
    """The address with a port that a restart can have again, where any would do."""
    if address.startswith("unix:"):
        return address
    host, port = split_host_port(address)
    shown = f"[{host}]" if ":" in host else host
    return address if port else f"{shown}:{free_port(host)}"


def _common(fleet: "Fleet", kind: str, ready_fd: int) -> Sequence[str]:
    secure = fleet.secured.flags(kind) if fleet.secured else []
    # A password in the URL goes into the environment (`environment`): everybody can read command lines.
    redis = [] if redis_url.has_password(fleet.redis_url) else [f"--redis={fleet.redis_url}"]
    return [*redis, *secure, f"--drain-s={fleet.options.drain_s}", f"--ready-fd={ready_fd}"]


def environment(fleet: "Fleet") -> dict[str, str]:
    """Environment variables of every process besides those of this one."""
    return {"ALLSPARK_REDIS": fleet.redis_url} if redis_url.has_password(fleet.redis_url) else {}


#: The command line of each kind of process, from the fleet, its index and its ready descriptor.
COMMANDS: dict[str, Callable[["Fleet", int, int], Sequence[str]]] = {
    "broker": broker_command,
    "gateway": gateway_command,
    "worker": worker_command,
}
