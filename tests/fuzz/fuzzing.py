"""Shared by the fuzzers: how long they run, what an input may cost, and how valid input is damaged.

ALLSPARK_FUZZ_SCALE=100 runs a hundred times as many examples as `make test`; ALLSPARK_FUZZ_SEED chooses
others.
"""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st

SCALE = float(os.environ.get("ALLSPARK_FUZZ_SCALE", "1"))
SEED = int(os.environ.get("ALLSPARK_FUZZ_SEED", "1"))
#: CPU time that any one input may take; valid ones take milliseconds.
CPU_S = 4.0


class TookTooLong(BaseException):
    """The code under test was interrupted."""


def fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same examples in every run, as many as the scale asks for."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        limits = settings(
            max_examples=max(1, int(examples * SCALE)),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        return seed(SEED)(limits(test))

    return decorate


@contextmanager
def bounded_time() -> Iterator[None]:
    """Fails if the block takes more than CPU_S seconds of CPU time, also where it catches everything."""
    expired = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal expired
        expired = True
        raise TookTooLong

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    except TookTooLong:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert not expired, f"this input takes more than {CPU_S:g} s of CPU time"


#: Numbers at the edges of what Python, NumPy, C and Rust can represent.
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    2**16,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    10**12,
    10**400,
]
FLOATS = [0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, 1e308, float("inf"), float("-inf"), float("nan")]
ODD: list[Any] = [
    None,
    True,
    False,
    "",
    "x",
    "1",
    "\0",
    "é" * 300,
    [],
    {},
    [None],
    [[]],
    {"": {}},
    [0],
    [-1],
    ["x"],
]

odd_values = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.integers(-9, 300),
    st.text(max_size=8),
    st.lists(st.sampled_from([*ODD[:6], *NUMBERS[:5], *FLOATS]), max_size=4),
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


@st.composite
def damaged_json(draw: st.DrawFn, valid: Any) -> bytes:
    """A JSON text: `valid` with up to three values replaced or removed, sometimes with bytes changed."""
    document = {"": json.loads(json.dumps(valid))}
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        container, key = places[draw(st.integers(0, len(places) - 1))]
        if draw(st.integers(0, 7)) or container is document:
            container[key] = copy.deepcopy(draw(odd_values))  # later ones may change its parts
        else:
            del container[key]
    data = json.dumps(document.get("")).encode()
    return draw(damaged_bytes(data)) if draw(st.integers(0, 9)) == 0 else data


@st.composite
def damaged_bytes(draw: st.DrawFn, valid: bytes, head: int | None = None) -> bytes:
    """`valid` with up to four places among its first `head` bytes overwritten, or cut off somewhere."""
    data, limit = bytearray(valid), max(1, head or len(valid))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, limit - 1))
        new = draw(st.one_of(st.binary(min_size=1, max_size=1), st.sampled_from([b"\xff" * 8, bytes(8)])))
        data[at : at + len(new)] = new
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 5)) == 0 else data)


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    """Brackets around nothing."""
    return (opening * depth + closing * depth).encode()
