"""The token file: who may call, as which tenant, with which scopes. It holds hashes, never tokens.

::

    [[token]]
    name = "team-a"
    sha256 = "9f86d081…"          # of the whole token
    tenant = "team-a"
    scopes = ["infer"]            # and "admin" for the life cycle of models and ShutdownService
    expires = 2027-01-01T00:00:00Z    # optional
    allow_shutdown = false        # optional: ShutdownService of an admin token stops the whole fleet

A token is `NAME.SECRET`. The name finds its entry; the secret is 256 random bits, so a plain SHA-256 keeps it
(slow password hashes are for what people can remember).
"""

import hmac
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

from allspark_bus import toml_file
from allspark_bus.watched import Watched, stamp
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

log = logging.getLogger(__name__)

MAX_TOKEN_CHARACTERS = 512
#: Owner of models that belong to nobody's tenant; no token may pose as it.
RESERVED_TENANTS = frozenset({"operator"})

Scope = Literal["infer", "admin"]


class TokenFileError(ValueError):
    """A token file that cannot be used; the text says why."""


class Unauthenticated(Exception):
    """No valid token; the text is for the caller and tells nothing about other tokens."""


class Token(BaseModel):
    """One entry. `sha256`: lower-case hexadecimal digest of the token's UTF-8 bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]
    expires: AwareDatetime | None = None
    allow_shutdown: bool = False


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    token: tuple[Token, ...] = ()


def hash_of(token: str) -> str:
    """What the token file keeps of a token."""
    return sha256(token.encode()).hexdigest()


def parse(text: str) -> dict[str, Token]:
    """Entries by name; raises TokenFileError."""
    tokens = toml_file.parse(text, _File, TokenFileError).token
    by_name = {token.name: token for token in tokens}
    if len(by_name) < len(tokens):
        raise TokenFileError("two tokens have the same name")
    for token in tokens:
        if token.tenant in RESERVED_TENANTS:
            raise TokenFileError(f"token {token.name}: no token may have the tenant {token.tenant!r}")
        if token.allow_shutdown and "admin" not in token.scopes:
            raise TokenFileError(f"token {token.name}: allow_shutdown needs the scope admin")
    return by_name


class Tokens:
    """The entries of a file, read again when it changes. A file that became unusable changes nothing.

    `now`: the wall clock that `expires` is compared with. Raises TokenFileError if the file is bad at first.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._now = now
        self._by_name = Watched(
            f"the tokens in {path}", lambda: [stamp(path)], self._read, TokenFileError, clock
        )

    def authenticate(self, authorization: str | None) -> Token:
        """The entry of an `authorization` value, `Bearer NAME.SECRET`; raises Unauthenticated."""
        by_name = self._by_name.now()
        scheme, _, text = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not text:
            raise Unauthenticated(
                "this address needs a token: send the metadata 'authorization: Bearer TOKEN'"
            )
        if len(text) > MAX_TOKEN_CHARACTERS:
            raise Unauthenticated(f"a token has at most {MAX_TOKEN_CHARACTERS} characters")
        token = by_name.get(text.partition(".")[0])
        # An unknown name costs the same comparison as a wrong secret.
        expected = token.sha256 if token else "0" * 64
        is_equal = hmac.compare_digest(hash_of(text), expected)
        if token is None or not is_equal:
            raise Unauthenticated("the token is not valid here: unknown, wrong or revoked")
        if token.expires is not None and self._now() >= token.expires:
            raise Unauthenticated(f"the token expired at {token.expires.isoformat()}: ask for a new one")
        return token

    def _read(self) -> dict[str, Token]:
        return toml_file.read(self._path, "token file", parse, TokenFileError)
