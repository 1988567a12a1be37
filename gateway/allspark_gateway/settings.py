"""Settings of a gateway."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from allspark_bus.setting_types import Count, GrpcAddresses, Metavar, Seconds, Size, ZmqEndpoints
from allspark_bus.settings import ProcessSettings
from pydantic import ByteSize, Field, model_validator


class GatewaySettings(ProcessSettings):
    """Serve the AllSpark gRPC service: requests go to the brokers, results come from Redis."""

    command: ClassVar[str] = "gateway"

    grpc: GrpcAddresses = ("127.0.0.1:50051",)
    """Address to serve: HOST:PORT (port 0: any free one) or unix:/path. Repeat for several."""
    broker: ZmqEndpoints = ("tcp://127.0.0.1:5550",)
    """Frontend endpoint of a broker. Repeat for several; the next one is used when one does not answer."""
    max_message_bytes: Size = ByteSize(64 << 20)
    """Largest gRPC message accepted; not more than the brokers' --max-message-bytes."""
    max_uuid_bytes: Count = 256
    """Longest request uuid accepted."""
    max_calls: Count = 16384
    """Calls served at once on each address; one more is answered RESOURCE_EXHAUSTED."""
    call_timeout_s: Seconds = 10.0
    """How long a call waits for a broker or for Redis before it is answered UNAVAILABLE."""
    model_timeout_s: Seconds = 600.0
    """How long BuildModel, StartModel, StopModel and the like wait for the workers."""
    status_deferral_s: Seconds = 2.0
    """How long after the end GenerateStatus may still answer Generating while a reader has unread tokens."""
    redelivery_s: Seconds = 2.0
    """How long tokens of an answer that is not known to have arrived are kept for it, in case its gateway
    died; then the next Get gives them again. A caller that keeps its own cursor never waits for this."""
    gather_s: Annotated[float, Field(ge=0, allow_inf_nan=False), Metavar("SECONDS")] = 0.2
    """Longest time that tokens are gathered for one answer of Get while many streams are read; 0: each token
    at once. The first token and the end of a request never wait."""
    allow_shutdown: GrpcAddresses = ()
    """Listener (one of --grpc) whose callers may stop the whole fleet with ShutdownService."""
    tls_cert: Annotated[Path | None, Metavar("FILE")] = None
    """Certificate (PEM, with its chain) for TLS on the HOST:PORT addresses; read again when it changes."""
    tls_key: Annotated[Path | None, Metavar("FILE")] = None
    """Private key of --tls-cert (PEM)."""
    tls_client_ca: Annotated[Path | None, Metavar("FILE")] = None
    """Admit only callers whose certificate one of these authorities (PEM) has signed."""
    tokens: Annotated[Path | None, Metavar("FILE")] = None
    """Token file (TOML): every call to a HOST:PORT address needs one of its tokens; read again when it
    changes. unix: addresses need none: only this user can connect to them."""

    def listening_on(self) -> tuple[str, ...]:
        """The gRPC addresses."""
        return self.grpc

    def is_secured(self) -> bool:
        """Encrypted, and every caller shows a token."""
        return self.tls_cert is not None and self.tokens is not None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.grpc:
            raise ValueError("a gateway needs at least one --grpc address")
        if not self.broker:
            raise ValueError("a gateway needs at least one --broker endpoint")
        if stray := set(self.allow_shutdown) - set(self.grpc):
            raise ValueError(f"--allow-shutdown names {', '.join(sorted(stray))}, which is not among --grpc")
        self._check_files()
        return self

    def _check_files(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        if (self.tls_cert or self.tokens) and all(address.startswith("unix:") for address in self.grpc):
            raise ValueError("--tls-cert and --tokens are for HOST:PORT addresses, and --grpc has none")
