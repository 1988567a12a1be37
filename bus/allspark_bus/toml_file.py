"""TOML files of operators, checked against a model: what is wrong is one line that says where."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


def parse(text: str, model: type[M], error: type[ValueError]) -> M:
    """Raises `error`."""
    try:
        return model.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise error(f"not TOML: {e}") from e
    except ValidationError as e:
        first = e.errors(include_url=False, include_context=False)[0]
        raise error(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from e


def read(path: Path, what: str, parse_text: Callable[[str], T], error: type[ValueError]) -> T:
    """What `parse_text` makes of a file. Raises `error`, with the path in the text."""
    try:
        return parse_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise error(f"cannot read the {what} {path}: {e}") from e
    except error as e:
        raise error(f"{what} {path}: {e}") from e
