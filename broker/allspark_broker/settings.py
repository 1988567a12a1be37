"""Settings of a broker."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from allspark_bus.setting_types import Count, Metavar, PathList, Seconds, Size, ZmqEndpoint
from allspark_bus.settings import ProcessSettings
from pydantic import ByteSize, model_validator


class BrokerSettings(ProcessSettings):
    """Route requests and control calls from gateways and producers to workers."""

    command: ClassVar[str] = "broker"

    frontend: ZmqEndpoint = "tcp://127.0.0.1:5550"
    """Endpoint for gateways and direct producers (port 0: any free one)."""
    backend: ZmqEndpoint = "tcp://127.0.0.1:5551"
    """Endpoint for workers (port 0: any free one)."""
    model_root: PathList = ()
    """Directory that models may be built from. Repeat for several; without one no model can be built."""
    max_queue: Count = 4096
    """Requests that may wait for a worker, per model; one more is denied."""
    tenants: Annotated[Path | None, Metavar("FILE")] = None
    """Tenants file (TOML) with weights and limits; read again when it changes. Without one all tenants have
    the same weight and no limits."""
    max_message_bytes: Size = ByteSize(64 << 20)
    """Largest envelope accepted."""
    max_uuid_bytes: Count = 256
    """Longest request uuid accepted."""
    heartbeat_s: Seconds = 0.4
    """Time between heartbeats to a worker."""
    worker_timeout_s: Seconds = 5.0
    """A worker that has been silent for this long is dead; its requests go to others."""
    ack_timeout_s: Seconds = 2.0
    """A dispatch that its worker does not acknowledge within this time goes to another."""
    result_ttl_s: Seconds = 3600.0
    """How long a finished result is kept without ReleaseRequest."""
    tombstone_ttl_s: Seconds = 300.0
    """How long a released or expired uuid is still answered as such."""

    def listening_on(self) -> tuple[str, ...]:
        """Both endpoints."""
        return self.frontend, self.backend

    def is_secured(self) -> bool:
        """CURVE on both of them."""
        return self.curve is not None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.worker_timeout_s < 3 * self.heartbeat_s:
            raise ValueError("--worker-timeout-s must be at least three times --heartbeat-s")
        for root in self.model_root:
            if not root.is_absolute():
                raise ValueError(f"--model-root {root} must be an absolute path")
        return self
