"""CURVE on ZeroMQ (RFC 26/CurveZMQ): every connection encrypted, both ends known by their keys.

Key files are those of `zmq.auth`: `NAME.key` has a public key, `NAME.key_secret` both. A broker's directory
holds its own `server.key_secret` and, in a folder for each role, the public keys that it admits:

    gateways/NAME.key       any call, for any tenant
    producers/TENANT.key    requests of that tenant
    workers/NAME.key        the backend

The directory of any other process holds `server.key` of the broker and its own `client.key_secret`.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from allspark_bus.secret_files import warn_if_exposed
from allspark_bus.settings import ConfigError
from allspark_bus.sparse_log import SparseLog
from allspark_bus.watched import Stamp, Watched, stamp

log = logging.getLogger(__name__)

KEY_CHARACTERS = 40  # of a key in Z85 (RFC 32)


class CurveError(ConfigError):
    """A directory of keys that cannot be used; the text says which file and why."""


class Role(StrEnum):
    """What a key is for; the value is its folder in a broker's directory."""

    GATEWAY = "gateways"
    PRODUCER = "producers"
    WORKER = "workers"


@dataclass(frozen=True, slots=True)
class Peer:
    """Whose key it is; the name is that of its file."""

    role: Role
    name: str


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of a process that connects to brokers (Z85)."""

    server: bytes
    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """From `server.key` and `client.key_secret`; raises CurveError."""
        public, secret = _load(directory / "client.key_secret", is_secret=True)
        return cls(_load(directory / "server.key")[0], public, secret)

    def apply(self, socket: "zmq.Socket[Any]") -> None:
        """Before connect."""
        socket.curve_serverkey = self.server
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The keys of a broker (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """From `server.key_secret`; raises CurveError."""
        return cls(*_load(directory / "server.key_secret", is_secret=True))

    def apply(self, socket: "zmq.Socket[Any]", domain: str) -> None:
        """Before bind. `domain` tells the authenticator which door the peer knocks at."""
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public
        socket.curve_server = True
        socket.zap_domain = domain.encode()


class AllowList:
    """The public keys in the folders of the roles, read again when they change.

    Raises CurveError if a key is bad at first; later mistakes change nothing.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._peers = Watched(f"the keys in {directory}", self._stamps, self._read, CurveError, clock)

    def peer(self, key: bytes) -> Peer | None:
        """Whose public key (Z85) this is; None for a stranger or a key that was removed."""
        return self._peers.now().get(key)

    def _files(self) -> list[tuple[Role, Path]]:
        return [(role, path) for role in Role for path in sorted((self._directory / role).glob("*.key"))]

    def _stamps(self) -> list[Stamp]:
        return [stamp(path) for _, path in self._files()]

    def _read(self) -> Mapping[bytes, Peer]:
        peers: dict[bytes, Peer] = {}
        for role, path in self._files():
            key = _load(path)[0]
            if key in peers:
                raise CurveError(f"{path} is the key of {peers[key].name} too: each process needs its own")
            peers[key] = Peer(role, path.stem)
        return peers


class Doorkeeper(AsyncioAuthenticator):
    """Answers libzmq's question (ZAP, RFC 27) whether a key may connect at a door, its domain.

    Start it before the sockets of its context are bound. The user id of an admitted peer is its public key,
    which every message carries (`key_of`), so that a removed key counts for open connections too.
    """

    def __init__(
        self, context: zmq.asyncio.Context, allowed: AllowList, doors: Mapping[str, set[Role]]
    ) -> None:
        super().__init__(context)
        self._allowed_keys = allowed
        self._doors = doors
        self._refusals = SparseLog(log)
        for domain in doors:
            self.configure_curve_callback(domain, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer with this public key (Z85) may connect."""
        peer = self._allowed_keys.peer(key)
        if peer is not None and peer.role in self._doors[domain]:
            return True
        who = "an unknown key" if peer is None else f"{peer.name} of {peer.role}"
        self._refusals.warning(f"refused a connection to the {domain}: {who} ({key.decode()})")
        return False


def key_of(frame: zmq.Frame) -> bytes:
    """The public key (Z85) of the peer that sent a frame of a message, after CURVE admitted it."""
    try:
        return str(frame.get("User-Id")).encode()
    except zmq.ZMQError as e:
        raise AssertionError("a message on a CURVE socket has a user id") from e


def _load(path: Path, *, is_secret: bool = False) -> tuple[bytes, bytes]:
    try:
        public, secret = zmq.auth.load_certificate(os.fspath(path))
        if is_secret:
            warn_if_exposed(path)
    except (OSError, ValueError) as e:
        raise CurveError(f"cannot read the CURVE key {path}: {e}") from e
    if len(public) != KEY_CHARACTERS or (is_secret and len(secret or b"") != KEY_CHARACTERS):
        raise CurveError(
            f"{path} holds no CURVE {'secret key' if is_secret else 'key'} of 40 characters (Z85)"
        )
    return public, secret or b""
