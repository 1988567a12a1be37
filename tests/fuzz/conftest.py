"""What every fuzzer runs under: a printed seed, and less memory than a mistake would take."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.fuzzing import SCALE, SEED

_ROOM = 3 << 30


@pytest.fixture(autouse=True, scope="module")
def bounded_memory() -> Iterator[None]:
    """An allocation of a length from the input fails here, as MemoryError, instead of filling the machine."""
    print(f"fuzzing with seed {SEED}, {SCALE} times the usual examples")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)
