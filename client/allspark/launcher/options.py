"""What a fleet on one machine consists of."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from allspark_bus.setting_types import split_host_port

from allspark.launcher.store import Fsync


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Number and place of the processes.

    ``grpc``: with one gateway it serves all of them; several gateways take turns, each the same number of
    addresses, or one address is counted up. ``data_dir`` None: a temporary directory that goes with the
    fleet.
    ``secure``: a directory of ``allspark certs``; TLS, tokens, CURVE and the store's ACL come from it.
    ``redis``: use this store instead of an embedded one, which has its writes on the disk as ``redis_fsync``
    says. ``*_args`` are further flags of each process.
    ``worker_command``: what to run instead of ``allspark worker``; it gets the same flags.
    """

    workers: int = 1
    gateways: int = 1
    brokers: int = 1
    grpc: tuple[str, ...] = ("127.0.0.1:0",)
    device: str = "cpu"
    data_dir: Path | None = None
    redis: str | None = None
    redis_fsync: Fsync = "everysec"
    secure: Path | None = None
    model_roots: tuple[Path, ...] = ()
    drain_s: float = 30.0
    start_timeout_s: float = 60.0
    gateway_args: tuple[str, ...] = ()
    broker_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    worker_command: tuple[str, ...] = (sys.executable, "-m", "allspark.cli", "worker")

    def __post_init__(self) -> None:
        for name in ("workers", "gateways", "brokers"):
            if getattr(self, name) < (0 if name == "workers" else 1):
                raise ValueError(f"{name} is {getattr(self, name)}; at least one is needed")
        if self.secure is not None and self.redis is not None:
            raise ValueError("secure is for the embedded store, not for another one")
        self.gateway_addresses()

    def gateway_addresses(self) -> list[tuple[str, ...]]:
        """The addresses of each gateway."""
        if self.gateways == 1:
            return [self.grpc]
        if len(self.grpc) == 1:
            return [(_count_up(self.grpc[0], index),) for index in range(self.gateways)]
        if not self.grpc or len(self.grpc) % self.gateways:
            given = f"{self.gateways} gateways and {len(self.grpc)} gRPC addresses"
            raise ValueError(f"{given}: give one address, or one for each gateway (or two, ...)")
        return [self.grpc[index :: self.gateways] for index in range(self.gateways)]

    def worker_device(self, index: int) -> str:
        """``cuda`` spreads the workers over the GPUs; anything else is the same for all."""
        return f"cuda:{index}" if self.device == "cuda" else self.device

    def worker_threads(self) -> int:
        """CPU threads of each worker: 0 lets a lone worker choose, several share the cores."""
        return 0 if self.workers <= 1 else max(1, len(os.sched_getaffinity(0)) // self.workers)


def _count_up(address: str, index: int) -> str:
    """``HOST:PORT+index``, or ``unix:/path.index``; port 0 stays, since the kernel picks different ones."""
    if address.startswith("unix:"):
        return f"{address}.{index}" if index else address
    host, port = split_host_port(address)
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port + index if port else 0}"
