"""Tells a damaged record from an outage, by what Redis, its scripts or a parser say of it."""

import contextlib
import re
from collections.abc import Iterator

from google.protobuf.message import DecodeError
from redis.exceptions import ResponseError

from allspark_bus.errors import Damaged, ParamError

# Errors that are no fault of the values have a code (OOM, READONLY, MISCONF); redis-py drops the code ERR.
_CODE = re.compile(r"[A-Z]{3,} ")
_WRONG_TYPE = "WRONGTYPE "
_SCRIPT, _NOT_ALLOWED = "user_script", "ACL failure"


def of_reply(error: Exception) -> Damaged | None:
    """The damage behind an error reply: a key of the wrong type, or a value that a script stumbled over."""
    text = str(error)
    is_damage = type(error) is ResponseError and (
        text.startswith(_WRONG_TYPE)
        or (_SCRIPT in text and not _CODE.match(text) and _NOT_ALLOWED not in text)
    )
    return Damaged(f"the record in Redis is damaged: {text}") if is_damage else None


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Whatever reading a record raises is Damaged, and says which one it is."""
    try:
        yield
    except Damaged as error:
        raise Damaged(f"{what}: {error.reason}") from error
    except (ValueError, TypeError, LookupError, AttributeError, DecodeError, ParamError) as error:
        raise Damaged(f"{what}: the record in Redis is damaged: {error!r}") from error
