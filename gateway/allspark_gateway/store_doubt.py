"""Redis has been silent to this gateway for some seconds, though it may answer the others.

A caller that keeps its own cursor loses nothing when its Get ends early: it asks another gateway. So its Get
is answered UNAVAILABLE soon. Callers without a cursor may not know how to go on, and keep the longer patience
that hides a restart of Redis from them.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from allspark_bus.errors import StoreUnavailable

SPREAD_S = 1.0  # parked calls end over this time, so that another gateway is not asked by all at once
GRACE_S = 1.0  # what a call that comes meanwhile may take
REASON = "Redis does not answer this gateway; nothing was lost: ask another one, or again"


class StoreDoubt:
    """Knows the calls that may end early."""

    def __init__(self) -> None:
        self._is_doubtful = False
        self._limits: set[asyncio.Timeout] = set()

    def tell(self, is_doubtful: bool) -> None:
        """Called again and again with what is true now; calls end when it becomes doubtful."""
        begins = is_doubtful and not self._is_doubtful
        self._is_doubtful = is_doubtful
        if begins:
            now = asyncio.get_running_loop().time()
            for limit in self._limits:
                limit.reschedule(now + random.uniform(0, SPREAD_S))

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """For a call that may end early. Raises StoreUnavailable."""
        limit = asyncio.timeout(GRACE_S if self._is_doubtful else None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError as e:
            if not limit.expired():
                raise
            raise StoreUnavailable(REASON) from e
        finally:
            self._limits.discard(limit)
