"""URLs of Redis: where the password is read from, and what may be shown of one.

`rediss://USER@HOST:PORT/0?ssl_ca_certs=FILE&password_file=FILE` is TLS, checked against an authority, as an
ACL user. `password_file` is ours, every other option is that of redis-py's `from_url`.
"""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.credentials import CredentialProvider

from allspark_bus.secret_files import warn_if_exposed

PASSWORD_FILE = "password_file"
#: Options of a URL; anything else would fail at the first connection only.
OPTIONS = frozenset(
    {
        *("db", PASSWORD_FILE, "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"),
        *("ssl_cert_reqs", "ssl_min_version", "socket_keepalive"),
    }
)


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
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if stray := options.keys() - OPTIONS:
        raise ValueError(f"the URL has the unknown option {', '.join(sorted(stray))}; known: {_names()}")
    if PASSWORD_FILE in options and parts.password:
        raise ValueError(f"the URL has a password and {PASSWORD_FILE}: leave one out")
    if parts.scheme != "rediss" and any(name.startswith("ssl_") for name in options):
        raise ValueError("options that begin with ssl_ are for rediss:// URLs")


def split(url: str) -> tuple[str, dict[str, Any]]:
    """The URL for `from_url`, and its further arguments."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = options.pop(PASSWORD_FILE, None)
    if path is None:
        return url, {}
    host = parts.netloc.rpartition("@")[2]
    query = f"?{urlencode(options)}" if options else ""
    bare = f"{parts.scheme}://{host}{parts.path}{query}"  # urlunsplit would take the // from unix://
    return bare, {"credential_provider": FilePassword(unquote(parts.username or ""), Path(path))}


def has_password(url: str) -> bool:
    """Whether the text itself is a secret."""
    return bool(urlsplit(url).password)


def shown(url: str) -> str:
    """The URL without its password, for people and logs."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def _names() -> str:
    return ", ".join(sorted(OPTIONS))
