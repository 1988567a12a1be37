"""Writes the set: secrets readable by this user only, nothing overwritten."""

import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allspark_bus import acl
from allspark_bus.curve import Role
from allspark_gateway.tokens import hash_of
from zmq.auth import create_certificates

from allspark.certs.authority import Authority, Pair

LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOKEN_BYTES = 32
OPERATOR_TOKEN = "admin"
_ENTRY = """\
[[token]]
name = "{name}"
sha256 = "{sha256}"
tenant = "{tenant}"
scopes = [{scopes}]
"""
_HEAD = """\
# Who may call the gateways (docs/security.md). The hashes are of whole tokens: sha256sum < NAME.token
"""


class CertsError(RuntimeError):
    """A set that cannot be written; the text says why."""


def write_set(
    directory: Path, *, hosts: Sequence[str] = (), tenants: Sequence[str] = ("default",), days: int = 365
) -> None:
    """Makes the directory and all files of the set in it; raises CertsError if it holds anything yet.

    ``hosts``: names and addresses of the servers besides loopback. Each of ``tenants`` gets a token of its
    name with the scope infer.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(directory.iterdir()):
            raise CertsError(f"{directory} is not empty: name a new directory, nothing is overwritten")
        _write_certificates(directory, [*LOOPBACK, *hosts], days)
        _write_tokens(directory, tenants)
        _write_store(directory, tenants)
        _write_curve(directory / "curve", tenants)
    except OSError as error:
        raise CertsError(f"cannot write {error.filename or directory}: {error.strerror}") from error
    except ValueError as error:
        raise CertsError(f"cannot make the certificates: {error}") from error


def _write_certificates(directory: Path, hosts: Sequence[str], days: int) -> None:
    authority = Authority.new("AllSpark development authority", days)
    _write_pair(directory, "ca", authority.pair)
    _write_pair(directory, "gateway", authority.issue("gateway", hosts))
    _write_pair(directory, "store", authority.issue("store", hosts))
    _write_pair(directory, "client", authority.issue("client"))


def _write_store(directory: Path, tenants: Sequence[str]) -> None:
    """The ACL file of Redis or Valkey, and the password of each user in it; `default` is off."""
    lines = ["user default reset off", acl.user_line("allspark", _new_password(directory, "store"))]
    for tenant in tenants:
        digest = _new_password(directory, f"store-{tenant}")
        lines.append(acl.reader_line(f"reader-{tenant}", digest, tenant))
    _write(directory / "store.acl", "\n".join([*lines, ""]).encode())


def _new_password(directory: Path, name: str) -> str:
    """Writes NAME.password; its hash as ACL files have it."""
    password = secrets.token_urlsafe(TOKEN_BYTES)
    _write(directory / f"{name}.password", password.encode())
    return hash_of(password)


def _write_curve(directory: Path, tenants: Sequence[str]) -> None:
    """A directory for each kind of process, complete in itself, so that a machine gets only what it needs."""
    server = _new_keys(directory / "broker", "server")
    clients = {"gateway": Role.GATEWAY, "worker": Role.WORKER}
    for name, role in clients.items():
        _admit(directory, name, role, server)
    for tenant in tenants:
        _admit(directory, f"producer-{tenant}", Role.PRODUCER, server, tenant)


def _admit(directory: Path, name: str, role: Role, server: bytes, admitted_as: str = "") -> None:
    client = _new_keys(directory / name, "client")
    _write(directory / name / "server.key", server, mode=0o644)
    folder = directory / "broker" / role
    folder.mkdir(exist_ok=True)
    _write(folder / f"{admitted_as or name}.key", client, mode=0o644)


def _new_keys(directory: Path, name: str) -> bytes:
    """Writes NAME.key_secret; the content of the file with the public key."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:  # mode 0700: pyzmq writes with the usual mode
        public, secret = create_certificates(scratch, name)
        _write(directory / f"{name}.key_secret", Path(secret).read_bytes())
        return Path(public).read_bytes()


def _write_tokens(directory: Path, tenants: Sequence[str]) -> None:
    entries = [_new_token(directory, OPERATOR_TOKEN, "default", ("infer", "admin"))]
    entries += [_new_token(directory, tenant, tenant, ("infer",)) for tenant in tenants]
    _write(directory / "tokens.toml", "\n".join([_HEAD, *entries]).encode())


def _new_token(directory: Path, name: str, tenant: str, scopes: Sequence[str]) -> str:
    token = f"{name}.{secrets.token_urlsafe(TOKEN_BYTES)}"
    _write(directory / f"{name}.token", token.encode())
    quoted = ", ".join(f'"{scope}"' for scope in scopes)
    return _ENTRY.format(name=name, sha256=hash_of(token), tenant=tenant, scopes=quoted)


def _write_pair(directory: Path, name: str, pair: Pair) -> None:
    _write(directory / f"{name}.pem", pair.certificate, mode=0o644)
    _write(directory / f"{name}.key", pair.key)


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
