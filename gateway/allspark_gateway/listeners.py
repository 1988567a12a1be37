"""gRPC listeners: one server for each address, whose callers are one tenant."""

import contextlib
import errno
import hashlib
import os
import socket
import stat
from pathlib import Path

import grpc
import grpc.aio

from allspark_gateway.settings import GatewaySettings
from allspark_gateway.tls import CertificateFiles, TlsError

DEFAULT_TENANT = "default"
UNIX = "unix:"
MAX_UNIX_PATH_BYTES = 107  # sockaddr_un on Linux
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
MIN_CLIENT_PING_MS = 1_000  # our clients ask after 2 s of silence; who asks more often is disconnected
HANDSHAKE_MS = 10_000  # of TLS and HTTP/2; a connection that says nothing costs a file descriptor


class ListenError(OSError):
    """An address that cannot be served; the text says why and what to do."""


def tenant_of(address: str) -> str:
    """TCP callers share one tenant; every unix socket is its own, named after its absolute path."""
    if not address.startswith(UNIX):
        return DEFAULT_TENANT
    path = os.path.abspath(address.removeprefix(UNIX))  # noqa: PTH100 (resolve() would follow links)
    return f"unix-{hashlib.blake2b(path.encode(), digest_size=8).hexdigest()}"


class Listener:
    """One address and its server. `bound` is the address with the real port once `open` returned."""

    def __init__(self, address: str, settings: GatewaySettings) -> None:
        self.address = address
        self.bound = address
        self.server = grpc.aio.server(
            maximum_concurrent_rpcs=settings.max_calls,
            options=_options(int(settings.max_message_bytes), settings.max_calls),
        )
        self._inode = 0
        self._files = (
            CertificateFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
            if settings.tls_cert and settings.tls_key and not address.startswith(UNIX)
            else None
        )

    async def open(self) -> None:
        """Binds and serves; raises ListenError."""
        if self.address.startswith(UNIX):
            self._bind_unix(Path(self.address.removeprefix(UNIX)))
        else:
            port = self._bind(self.address)
            self.bound = f"{self.address.rpartition(':')[0]}:{port}"
        await self.server.start()

    def _bind(self, address: str) -> int:
        try:
            if self._files is None:
                return self.server.add_insecure_port(address)
            return self.server.add_secure_port(address, self._files.credentials())
        except TlsError as e:
            raise ListenError(f"cannot serve TLS on {address}: {e}") from e
        except RuntimeError as e:
            raise ListenError(f"cannot listen on {address}: in use, or not of this machine") from e

    def _bind_unix(self, path: Path) -> None:
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise ListenError(f"cannot listen on {path}: longer than {MAX_UNIX_PATH_BYTES} bytes")
        _remove_stale(path)
        mask = os.umask(0o177)  # the socket must never be open to others, not even for a moment
        try:
            self._bind(self.address)
        finally:
            os.umask(mask)
        self._inode = path.stat().st_ino

    async def stop(self, grace_s: float | None) -> None:
        """Takes no new calls; cancels those that are left after the grace (None: at once)."""
        await self.server.stop(grace_s)
        if self._inode:
            self._unlink(Path(self.address.removeprefix(UNIX)))

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == self._inode:  # not the socket of a successor
                path.unlink()


def _remove_stale(path: Path) -> None:
    """Removes a socket that nobody serves; raises ListenError if it is served or is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as e:
        raise ListenError(f"cannot listen on {path}: {e.strerror}") from e
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"cannot listen on {path}: a file that is no socket is there; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(str(path))
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise ListenError(f"cannot listen on {path}: another process serves it; stop that one first")
    path.unlink(missing_ok=True)


def _options(max_message_bytes: int, max_calls: int) -> list[tuple[str, int]]:
    return [
        # By default calls that arrive faster than they can be looked at are cancelled at random from the
        # thousandth on, although max_calls has room for them; beyond it they get a status that says why.
        ("grpc.server.max_pending_requests", max_calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * max_calls),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),  # a second gateway on the same port must fail, not share it silently
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_CLIENT_PING_MS),
    ]
