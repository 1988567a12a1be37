"""URLs of Redis: where it is, how to log in, and what may be shown of one.

- `redis://USER@HOST:PORT/0`, `rediss://...` (TLS, checked against an authority), `unix:///PATH`: one server;
- `redis+sentinel://USER@HOST:PORT,HOST:PORT/NAME[/0]`: the master NAME of the Sentinels that are listed;
- `redis+cluster://USER@HOST:PORT,HOST:PORT`: a Redis Cluster, of which some nodes are listed;
- `rediss+sentinel://` and `rediss+cluster://`: the same with TLS (between us and every server).

`password_file`, `min_replicas` (acknowledge nothing that fewer replicas have) and `sentinel_user`,
`sentinel_password_file` (the login of the Sentinels, none by default) are ours, every other option is that of
redis-py's `from_url`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio.connection import parse_url
from redis.credentials import CredentialProvider

from allspark_bus.secret_files import warn_if_exposed

Address = tuple[str, int]

PASSWORD_FILE = "password_file"
MIN_REPLICAS = "min_replicas"
SENTINEL_USER, SENTINEL_PASSWORD_FILE = "sentinel_user", "sentinel_password_file"
SINGLE, SENTINEL, CLUSTER = "single", "sentinel", "cluster"
MAX_REPLICAS = 16
_KINDS = {"": SINGLE, "sentinel": SENTINEL, "cluster": CLUSTER}
_PORTS = {SENTINEL: 26379, CLUSTER: 6379}
#: Options of a URL; anything else would fail at the first connection only.
OPTIONS = frozenset(
    {
        *("db", PASSWORD_FILE, "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"),
        *("ssl_cert_reqs", "ssl_min_version", "socket_keepalive"),
        *(MIN_REPLICAS, SENTINEL_USER, SENTINEL_PASSWORD_FILE),
    }
)
_URL = re.compile(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
_OURS = (PASSWORD_FILE, MIN_REPLICAS, SENTINEL_USER, SENTINEL_PASSWORD_FILE)


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that was taken apart.

    `kind`: SINGLE, SENTINEL or CLUSTER. `addresses`: the Sentinels or the cluster nodes that are listed.
    `service`: the master's name. `arguments` and `sentinel_arguments`: of redis-py's connections.
    """

    kind: str
    addresses: tuple[Address, ...]
    service: str
    min_replicas: int
    arguments: dict[str, Any]
    sentinel_arguments: dict[str, Any]


class FilePassword(CredentialProvider):
    """Reads the password at every connect, so that a changed one needs no restart."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """(user, password), or only the password of the default user; raises OSError."""
        warn_if_exposed(self._path)
        password = self._path.read_text(encoding="utf-8").strip()
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same: a file of a few bytes."""
        return self.get_credentials()


def check(url: str) -> None:
    """Raises ValueError for options that are not known or contradict each other; the text has no secrets."""
    parts = _split(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if stray := options.keys() - OPTIONS:
        raise ValueError(f"the URL has the unknown option {', '.join(sorted(stray))}; known: {_names()}")
    if PASSWORD_FILE in options and parts.password:
        raise ValueError(f"the URL has a password and {PASSWORD_FILE}: leave one out")
    scheme, _ = _split_scheme(parts.scheme)
    if scheme != "rediss" and any(name.startswith("ssl_") for name in options):
        raise ValueError("options that begin with ssl_ are for rediss:// URLs")
    parse(url)


def parse(url: str) -> Target:
    """Takes a URL apart. Raises ValueError; the text has no secrets."""
    parts = _split(url)
    scheme, kind = _split_scheme(parts.scheme)
    if not (parts.netloc or parts.path):
        raise ValueError("the URL names no server")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    ours = {name: options.pop(name) for name in _OURS if name in options}
    login, _, hosts = parts.netloc.rpartition("@")
    addresses: tuple[Address, ...] = ()
    service, path = "", parts.path
    if kind != SINGLE:
        addresses = tuple(_address(host, _PORTS[kind]) for host in hosts.split(","))
        service, path = _service(kind, parts.path, options)
        hosts = "localhost"  # replaced at every connection
    if kind != SENTINEL and (stray := {SENTINEL_USER, SENTINEL_PASSWORD_FILE} & ours.keys()):
        raise ValueError(f"{' and '.join(sorted(stray))}: the URL is none of Sentinels")
    if PASSWORD_FILE in ours:
        login = ""
    query = f"?{urlencode(options)}" if options else ""
    # urlunsplit would take the // from unix://
    bare = f"{scheme}://{login}{'@' if login else ''}{hosts}{path}{query}"
    try:
        arguments: dict[str, Any] = dict(parse_url(bare))
    except ValueError:
        # Its text may hold a part of the password, if that has characters that end a host name.
        raise ValueError("its port, database or an option has a value that cannot be read") from None
    sentinel = {k: v for k, v in arguments.items() if k.startswith("ssl_")}
    if PASSWORD_FILE in ours:
        user = unquote(parts.username or "")
        arguments["credential_provider"] = FilePassword(user, Path(ours[PASSWORD_FILE]))
    if SENTINEL_PASSWORD_FILE in ours:
        file = Path(ours[SENTINEL_PASSWORD_FILE])
        sentinel["credential_provider"] = FilePassword(ours.get(SENTINEL_USER, ""), file)
    elif SENTINEL_USER in ours:
        raise ValueError(f"{SENTINEL_USER} needs {SENTINEL_PASSWORD_FILE}")
    return Target(kind, addresses, service, _replicas(ours.get(MIN_REPLICAS, "0")), arguments, sentinel)


def _split(url: str) -> SplitResult:
    """RFC 3986, appendix B. `urlsplit` of newer Pythons refuses brackets that are not all of the host."""
    found = _URL.fullmatch(url.strip())
    if found is None:
        return SplitResult("", "", "", "", "")
    scheme, netloc, path, query, fragment = (part or "" for part in found.groups())
    return SplitResult(scheme.lower(), netloc, path, query, fragment)


def _split_scheme(scheme: str) -> tuple[str, str]:
    base, _, kind = scheme.partition("+")
    if base not in ("redis", "rediss", "unix") or kind not in _KINDS or (base == "unix" and kind):
        raise ValueError("it is not a redis://, rediss:// or unix:// URL")  # its text may hold a password
    return base, _KINDS[kind]


def _address(text: str, default_port: int) -> Address:
    """HOST, HOST:PORT, [IPV6] or [IPV6]:PORT."""
    try:
        found = urlsplit(f"//{text}")
        host, port = found.hostname, found.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ValueError("the URL must list its servers as HOST:PORT,HOST:PORT")
    return host, port or default_port


def _service(kind: str, path: str, options: dict[str, str]) -> tuple[str, str]:
    """(name of the master, path that is left: the database)"""
    first, _, database = path.removeprefix("/").partition("/")
    if kind == SENTINEL:
        if not first or (database and not database.isdigit()):
            raise ValueError("a URL of Sentinels ends in /NAME or /NAME/DATABASE; NAME is that of the master")
        return unquote(first), f"/{database}" if database else ""
    if first not in ("", "0") or database or options.get("db", "0") != "0":
        raise ValueError("a Redis Cluster has database 0 only")
    return "", ""


def _replicas(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_REPLICAS:
        raise ValueError(f"{MIN_REPLICAS} must be a number from 0 to {MAX_REPLICAS}")
    return int(text)


def has_password(url: str) -> bool:
    """Whether the text itself is a secret."""
    return bool(_split(url).password)


def shown(url: str) -> str:
    """The URL without its password, for people and logs."""
    parts = _split(url)
    if not parts.password:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def _names() -> str:
    return ", ".join(sorted(OPTIONS))
