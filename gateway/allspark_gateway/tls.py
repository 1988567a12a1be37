"""TLS of the gateway's TCP listeners, from files that may be replaced while it runs."""

import logging
import os
import ssl
from pathlib import Path

import grpc
from allspark_bus.secret_files import warn_if_exposed

log = logging.getLogger(__name__)


class TlsError(ValueError):
    """Certificate files that cannot be used; the text says why."""


class CertificateFiles:
    """Certificate chain and key in PEM, and with `client_ca` the authority that callers' certificates need.

    gRPC asks before every handshake (`fetch`), so a renewed certificate serves the next connection.
    Files that became unusable change nothing.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._stamps: tuple[tuple[int, int, int], ...] = ()

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`; raises TlsError."""
        return grpc.dynamic_ssl_server_credentials(
            self._read(),
            self.fetch,  # type: ignore[arg-type]  # the stub forgot that None means no change
            require_client_authentication=self._client_ca is not None,
        )

    def fetch(self) -> "grpc.ServerCertificateConfiguration | None":
        """The files if they changed, else None; runs on a thread of gRPC and never raises."""
        try:
            if self._stamp() == self._stamps:
                return None
            config = self._read()
        except (OSError, TlsError) as e:
            log.error("new connections get the certificate from before: %s", e)
            return None
        log.info("serving the certificate that is now in %s", self._certificate)
        return config

    def _read(self) -> grpc.ServerCertificateConfiguration:
        try:
            stamps = self._stamp()
            warn_if_exposed(self._key)
            key, chain = self._key.read_bytes(), self._certificate.read_bytes()
            roots = self._client_ca.read_bytes() if self._client_ca else None
        except OSError as e:
            raise TlsError(f"cannot read {e.filename}: {e.strerror}") from e
        _check_pair(self._certificate, self._key)
        if roots is not None and b"-----BEGIN CERTIFICATE-----" not in roots:
            raise TlsError(f"{self._client_ca} holds no PEM certificate")
        self._stamps = stamps
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        files = filter(None, (self._certificate, self._key, self._client_ca))
        found = [os.stat(path) for path in files]  # noqa: PTH116
        return tuple((f.st_mtime_ns, f.st_size, f.st_ino) for f in found)


def _check_pair(certificate: Path, key: Path) -> None:
    """gRPC would only fail at the first handshake, with no reason: OpenSSL tells what is wrong with them."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, OSError) as e:
        raise TlsError(f"{certificate} and {key} are not a PEM certificate and its key: {e}") from e
