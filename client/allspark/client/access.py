"""How a client proves who it is and whom it trusts: certificates of TLS, and a token."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
from allspark_proto import metadata

Options = Sequence[tuple[str, int]]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """``ca``: PEM certificates of the authorities that gateways are trusted by; empty: no TLS.

    ``certificate`` and ``key``: this client's own, in PEM, for gateways that ask for one. ``token``: see
    docs/security.md. ``unix:`` addresses never use TLS: only their owner can connect to them.
    """

    ca: bytes = field(default=b"", repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("a client certificate and its key belong together")
        if self.certificate and not self.ca:
            raise ValueError(
                "a client certificate needs TLS: name the authority that the gateways are trusted by"
            )
        if self.token and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise ValueError("a token is one word of printable ASCII characters")

    @classmethod
    def from_files(
        cls,
        *,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        token: Path | None = None,
    ) -> Self:
        """Reads what is named; raises OSError, or ValueError for content that cannot be used."""
        text = token.read_text(encoding="utf-8").strip() if token else ""
        if token and not text:
            raise ValueError(f"{token} holds no token")
        return cls(ca=_read(ca), certificate=_read(certificate), key=_read(key), token=text)

    def check(self, addresses: Sequence[str]) -> None:
        """Raises ValueError if the token would travel unencrypted to another machine."""
        exposed = [address for address in addresses if self.token and not self.ca and not _is_local(address)]
        if exposed:
            raise ValueError(
                f"a token is not sent to {', '.join(exposed)} without TLS: name an authority (ca)"
            )

    def metadata(self, pairs: Sequence[tuple[str, str]] = ()) -> Pairs:
        """Request metadata of a call."""
        return (*pairs, (metadata.AUTHORIZATION, f"Bearer {self.token}")) if self.token else tuple(pairs)

    def channel(self, address: str, options: Options) -> grpc.Channel:
        """A blocking channel; its files are checked at the first handshake."""
        if not self._is_encrypted(address):
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._credentials(), options=options)

    def aio_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """A channel for asyncio."""
        if not self._is_encrypted(address):
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._credentials(), options=options)

    def _is_encrypted(self, address: str) -> bool:
        return bool(self.ca) and not address.startswith("unix:")

    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.certificate or None)


def _read(path: Path | None) -> bytes:
    if path is None:
        return b""
    content = path.read_bytes()
    if b"-----BEGIN " not in content:
        raise ValueError(f"{path} is not a PEM file")
    return content


def _is_local(address: str) -> bool:
    """Whether only this machine can be reached; a name is never looked up."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
