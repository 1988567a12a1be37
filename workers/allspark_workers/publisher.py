"""Appends what the engines produce to the streams: one pipelined round trip for all requests of a step.

Runs on the worker's loop, so the engine thread never waits for Redis. An append costs every process on its
way CPU that the engine may share, so the tokens of steps that follow each other fast share one. While Redis
is away, or its memory is full, tokens are kept; when `bound` of them wait, their requests are held in the
engine until the backlog is half gone.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from allspark_bus import tensors
from allspark_bus.ledger import APPENDED, FULL, GAP, STALE, Append, Ending, Ledger
from allspark_bus.text_inputs import TEXT

from allspark_workers.convert import ending_of, tensor_bytes
from allspark_workers.engine.types import FinishReason, StepOutput
from allspark_workers.ports import EnginePort
from allspark_workers.texts import TextPieces

log = logging.getLogger(__name__)

APPENDS_PER_S = 200  # streams appended to in a second, beyond which the appends are spaced further
LONGEST_S = 0.1
FULL_RETRY_S = 0.25  # between attempts to append while the memory of Redis is full


@dataclass(slots=True)
class Publication:
    """One request on this worker. `tokens[:published]` are in its stream."""

    request_id: str
    model: str
    epoch: int
    engine: EnginePort
    tokens: list[int] = field(default_factory=list)
    published: int = 0
    first_count: int = 1  # tokens that the first append waits for
    later_count: int = 1  # and every later one; the terminal record flushes what is left
    ending: Ending | None = None
    tensors: dict[str, bytes] = field(default_factory=dict)  # of the terminal record
    text: TextPieces | None = None  # of a request that wants it with its tokens
    has_begun: bool = False  # an append has been sent, though perhaps not answered yet
    is_cancelled: bool = False
    is_held: bool = False

    @property
    def backlog(self) -> int:
        return len(self.tokens) - self.published

    @property
    def is_urgent(self) -> bool:
        """Whether somebody may be waiting for the first token or the end."""
        return not self.has_begun or self.ending is not None

    @property
    def awaits_tokens(self) -> bool:
        """The engine owes this request a token or an end."""
        return not (self.is_cancelled or self.is_held or self.ending is not None)

    def next_tensors(self) -> dict[str, bytes]:
        """What goes with the tokens of the next append."""
        if self.text is None:
            return self.tensors
        piece = self.text.piece(self.tokens, self.published, is_last=self.ending is not None)
        return self.tensors | {TEXT: tensors.from_string(TEXT, piece).SerializeToString()}

    @property
    def is_due(self) -> bool:
        if self.is_cancelled:
            return False
        wanted = self.first_count if self.published == 0 else self.later_count
        return self.ending is not None or self.backlog >= wanted


class Publisher:
    """`on_end(publication)` is called when a request has left this worker, whatever the way.

    `interval_s` is the least time between two appends, unless there is a first token or an end to append.
    """

    def __init__(
        self, ledger: Ledger, bound: int, interval_s: float, on_end: Callable[[Publication], None]
    ) -> None:
        self._ledger = ledger
        self._bound = bound
        self._interval_s = interval_s
        self._on_end = on_end
        self._open: dict[str, Publication] = {}
        self._due: dict[str, Publication] = {}
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()  # what is due shall be appended now
        self._next_append_s = float("-inf")
        self._backlog = 0
        self._holding = False
        self._is_full = False  # as of the last append
        self._doubted = asyncio.Event()  # a broker may have taken this worker for dead
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._open)

    def publications(self) -> list[Publication]:
        """Requests this worker has, in any state."""
        return list(self._open.values())

    def get(self, rid: str) -> Publication | None:
        return self._open.get(rid)

    def open(self, publication: Publication) -> None:
        """Takes responsibility for a request; before it is submitted to the engine."""
        self._open[publication.request_id] = publication
        self.empty.clear()

    def add(self, outputs: list[StepOutput]) -> None:
        """Takes the outputs of a step. Loop thread only."""
        for output in outputs:
            publication = self._open.get(output.request_id)
            if publication is None or publication.epoch != output.epoch:
                continue
            if publication.is_cancelled:
                if output.finish is not None:
                    self._close(publication)
                continue
            publication.tokens.extend(output.tokens)
            self._backlog += len(output.tokens)
            if output.finish is not None:
                publication.ending = ending_of(output.finish, output.message)
                publication.tensors = tensor_bytes(output.tensors)
            if publication.is_due:
                self._due[publication.request_id] = publication
                if publication.is_urgent:
                    self._hurry.set()
        if self._due:
            self._wake.set()
        if self._backlog > self._bound and not self._holding:
            self._hold()

    def fail(self, publication: Publication, ending: Ending) -> None:
        """Ends a request that never entered the engine."""
        publication.ending = ending
        self._due[publication.request_id] = publication
        self._hurry.set()
        self._wake.set()

    def cancel(self, rid: str) -> bool:
        """Stops a request here; nothing more of it is appended. False if it is not here."""
        publication = self._open.get(rid)
        if publication is None:
            return False
        if not publication.is_cancelled:
            publication.is_cancelled = True
            self._due.pop(rid, None)
            self._backlog -= publication.backlog
            if publication.ending is not None:
                self._close(publication)
            else:
                publication.engine.cancel(rid)
        return True

    def abandon(self, publication: Publication) -> None:
        """Forgets a request whose engine will say nothing more of it."""
        if not publication.is_cancelled:
            publication.is_cancelled = True
            self._due.pop(publication.request_id, None)
            self._backlog -= publication.backlog
        self._close(publication)

    def _close(self, publication: Publication) -> None:
        if self._open.get(publication.request_id) is publication:
            del self._open[publication.request_id]
            self._on_end(publication)
            if not self._open:
                self.empty.set()

    async def run(self) -> None:
        """Appends for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due:
                await self._gather()
                due, self._due = list(self._due.values()), {}
                self._space(len(due))
                if due:  # cancelled meanwhile otherwise
                    await self._append(due)
                if self._holding and self._backlog <= self._bound // 2:
                    self._let_go()

    def doubt(self) -> None:
        """A broker was silent, or does not know this worker: it may have claimed what is here."""
        self._doubted.set()

    async def run_checks(self) -> None:
        """For ever: lets go of what was claimed, without waiting for a refused append.

        Every death that was counted meanwhile is taken back (`Losses.survived`).
        """
        while True:
            await self._doubted.wait()
            self._doubted.clear()
            held = list(self._open.values())
            answers = await self._ledger.losses.survived([(p.request_id, p.epoch) for p in held])
            for p, is_ours in zip(held, answers, strict=True):
                if not is_ours and self._open.get(p.request_id) is p:
                    self.cancel(p.request_id)

    async def _gather(self) -> None:
        """Waits until the next append is due."""
        loop = asyncio.get_running_loop()
        if self._next_append_s > loop.time():
            timer = loop.call_at(self._next_append_s, self._hurry.set)
            await self._hurry.wait()
            timer.cancel()
        self._hurry.clear()

    def _space(self, num_streams: int) -> None:
        """Sets when the append after this one is due."""
        if self._interval_s:
            pause_s = max(self._interval_s, min(LONGEST_S, num_streams / APPENDS_PER_S))
            self._next_append_s = asyncio.get_running_loop().time() + pause_s

    async def _append(self, due: list[Publication]) -> None:
        appends = [self._append_of(p) for p in due]
        answers = await self._ledger.append(appends)
        self._note_memory(is_full=any(code == FULL for code, _ in answers))
        for p, a, (code, position) in zip(due, appends, answers, strict=True):
            if p.is_cancelled:
                continue
            if code == APPENDED:
                self._backlog -= len(a.tokens)
                p.published += len(a.tokens)
                if a.ending is not None:
                    self._close(p)
                elif p.is_due:
                    self._due[p.request_id] = p
            elif code == FULL:
                self._due[p.request_id] = p
            elif code == GAP and position <= len(p.tokens):
                self._rewind(p, position)
            else:
                log.info("request %s was taken over or ended elsewhere (code %d)", p.request_id, code)
                self.cancel(p.request_id)
        claimed = [
            (a.request_id, a.epoch) for a, (code, _) in zip(appends, answers, strict=True) if code == STALE
        ]
        if claimed:
            await self._ledger.losses.survived(claimed)

    def _note_memory(self, *, is_full: bool) -> None:
        if is_full:
            self._next_append_s = asyncio.get_running_loop().time() + FULL_RETRY_S
        if is_full != self._is_full:
            log.warning("the memory of Redis is %s", "full: tokens wait" if is_full else "not full any more")
        self._is_full = is_full

    def _append_of(self, p: Publication) -> Append:
        p.has_begun = True
        try:
            tensors = p.next_tensors()
        except Exception as e:
            # Of the library that decodes; the request fails, and nobody else with it.
            log.exception("request %s: its tokens have no text", p.request_id)
            p.text, p.ending = None, ending_of(FinishReason.ERROR, f"decoding its tokens failed: {e!r}")
            p.engine.cancel(p.request_id)
            tensors = {}
        return Append(p.request_id, p.model, p.epoch, p.published, p.tokens[p.published :], p.ending, tensors)

    def _rewind(self, p: Publication, position: int) -> None:
        """The stream is elsewhere than this worker thought (a fail-over lost its tail): go on from there."""
        log.warning(
            "request %s: stream is at %d, not %d; appending from there", p.request_id, position, p.published
        )
        self._backlog += p.published - position
        p.published = position
        self._due[p.request_id] = p

    def _hold(self) -> None:
        self._holding = True
        log.warning("%d tokens wait for Redis: requests pause", self._backlog)
        for p in self._open.values():
            if not p.is_cancelled and p.ending is None:
                p.is_held = True
                p.engine.hold(p.request_id)

    def _let_go(self) -> None:
        self._holding = False
        for p in self._open.values():
            if p.is_held:
                p.is_held = False
                p.engine.resume(p.request_id)
