"""What a process holds, on request: SIGUSR1 writes a line of JSON to its log, for those who look for a leak.

Counted are the entries of every container that an object of this product holds, by class and attribute, so
that a new map is seen without being registered anywhere; nothing is counted until somebody asks.
"""

import asyncio
import gc
import json
import logging
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

MARK = "vitals "
_CONTAINERS = (dict, set, list, deque)
_PRODUCT = "allspark"


def sizes() -> dict[str, int]:
    """Entries by "module.Class.attribute" (with those of containers in them), and some totals.

    "objects" counts what Python's garbage collector tracks, after a full collection; "tasks" those of the
    running loop. Containers that are empty in all objects of a class are left out.
    """
    gc.collect()
    found = gc.get_objects()
    totals: Counter[str] = Counter()
    for thing in found:
        kind = type(thing)
        # Some types of extension modules have a descriptor there.
        if str(kind.__module__).startswith(_PRODUCT):
            for name, value in _attributes(thing):
                if isinstance(value, _CONTAINERS) and (size := _size(value)):
                    totals[f"{kind.__module__}.{kind.__qualname__}.{name}"] += size
    totals["objects"] = len(found)
    totals["tasks"] = len(asyncio.all_tasks())
    totals["threads"] = threading.active_count()
    return dict(sorted(totals.items()))


def listen(loop: asyncio.AbstractEventLoop) -> None:
    """From now on SIGUSR1 writes `sizes` to the log."""
    loop.add_signal_handler(signal.SIGUSR1, _write)


def _write() -> None:
    log.info("%s%s", MARK, json.dumps(sizes()))


def _attributes(thing: object) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield name, getattr(thing, name, None)


def _size(container: Any) -> int:
    """Other threads may change what is being counted; then the outer number has to do."""
    try:
        values = container.values() if isinstance(container, dict) else container
        return len(container) + sum(len(v) for v in values if isinstance(v, _CONTAINERS))
    except RuntimeError:
        return len(container)
