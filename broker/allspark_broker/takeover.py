"""What nobody attends to any more: changes of models whose broker died, requests whose model is gone."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from allspark_bus.catalogue import ModelRecord, ModelState
from allspark_bus.errors import FleetError

from allspark_broker.dispatcher import Dispatcher
from allspark_broker.lifecycle import BUSY, Lifecycle

log = logging.getLogger(__name__)

MARGIN_S = 2.0  # beyond the drain limit, before a change counts as abandoned
AT_REST = frozenset({ModelState.BUILT, ModelState.STOPPED})


class Takeover:
    """Finishes what is unfinished. Every step is a compare-and-set, so two brokers may do it at once."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        dispatcher: Dispatcher,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._dispatcher = dispatcher
        self._patience_s = drain_s + MARGIN_S
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}  # model -> generation, and since when it is unfinished
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def look(self) -> None:
        """A duty of every broker."""
        unfinished = {r.name: r for r in self._lifecycle.models.values() if _finish(self._lifecycle, r)}
        self._seen = {n: s for n, s in self._seen.items() if n in unfinished}
        for name, record in unfinished.items():
            generation, since_s = self._seen.get(name, (0, 0.0))
            if generation != record.generation:
                self._seen[name] = record.generation, self._clock()
            elif self._clock() - since_s > self._patience_s and name not in self._tasks:
                self._tasks[name] = asyncio.ensure_future(self._take_over(record))
        await self._end_strays()

    async def _take_over(self, record: ModelRecord) -> None:
        log.info("model %r is %s and nobody attends to it; taking over", record.name, record.state.value)
        try:
            finish = _finish(self._lifecycle, record)
            if finish is not None:
                await finish(record)
        except FleetError as e:
            log.warning("model %r: %s", record.name, e.reason)
        finally:
            del self._tasks[record.name]

    async def _end_strays(self) -> None:
        """Requests that were admitted while their model was stopped or released elsewhere."""
        for name, queue in list(self._dispatcher.queues.items()):
            record = self._lifecycle.models.get(name)
            if not len(queue) or (record is not None and record.state not in AT_REST):
                continue
            state = record.state.value if record else "released"
            while (waiting := queue.peek()) is not None:
                queue.remove(waiting.request_id)
                message = f"model {name!r} was {state} before the request began"
                await self._lifecycle.end_request(waiting.request_id, name, message)

    def close(self) -> None:
        """Ends what is in progress; another broker goes on with it."""
        for task in self._tasks.values():
            task.cancel()


def _finish(lifecycle: Lifecycle, record: ModelRecord) -> Callable[[ModelRecord], Awaitable[None]] | None:
    """What brings an unfinished change to its end; None for a model at rest."""
    if record.state in BUSY:
        is_stop = record.state is ModelState.STOPPING
        return lifecycle.finish_stop if is_stop else lifecycle.finish_release
    return None if record.is_built else lifecycle.join_build
