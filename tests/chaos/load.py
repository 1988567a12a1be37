"""Clients that never give up, and the judge of what they got."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from allspark.client import AsyncClient, AsyncRequest, RequestInterrupted, StatusError
from allspark_bus import keys
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import records

from tests.chaos.workload import Answer, Ask, Workload

T = TypeVar("T")
PATIENCE_S = 120.0


@dataclass
class Story:
    """One request as its client saw it.

    `events`: when something arrived, by the monotonic clock; `lengths`: how many tokens it had by then.
    """

    index: int
    asked: Ask
    load: str = "chaos"
    events: list[float] = field(default_factory=lambda: [time.monotonic()])
    lengths: list[int] = field(default_factory=lambda: [0])
    tokens: list[int] = field(default_factory=list)
    ended_at: float | None = None
    finish_reason: str = ""
    deaths: int = 0
    dead_workers: tuple[str, ...] = ()  # as the ledger has them in the end
    is_over: bool = False

    @property
    def uuid(self) -> str:
        return f"{self.load}-{self.index}"

    def note(self) -> float:
        """Something arrived now."""
        self.events.append(time.monotonic())
        self.lengths.append(len(self.tokens))
        return self.events[-1]


class Load:
    """`clients` requests at a time until told to finish. What is wrong with any is in `complaints`."""

    def __init__(
        self, workload: Workload, addresses: Sequence[str], store: Store, clients: int, name: str = "chaos"
    ) -> None:
        self._name = name
        self._workload = workload
        self._addresses = addresses
        self._store = store
        self._clients = clients
        self._next = 0
        self._is_finishing = False
        self.stories: list[Story] = []
        self.complaints: list[str] = []
        self.denied = 0

    async def run(self) -> None:
        """Returns when every request that was begun has ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    def finish(self) -> None:
        """Begin no further request."""
        self._is_finishing = True

    async def _client(self, number: int) -> None:
        turn = number % len(self._addresses)
        addresses = [*self._addresses[turn:], *self._addresses[:turn]]
        async with AsyncClient(addresses, timeout_s=5.0, retry_s=PATIENCE_S) as client:
            while not self._is_finishing:
                index, self._next = self._next, self._next + 1
                story = Story(index, self._workload.ask(index), self._name)
                self.stories.append(story)
                try:
                    async with asyncio.timeout(2 * PATIENCE_S):
                        await self._one(client, story)
                except Exception as e:  # noqa: BLE001 - every failure is a finding, and the others go on
                    self._complain(story, f"failed after {len(story.tokens)} tokens: {e!r}")
                story.is_over = True

    async def _one(self, client: AsyncClient, story: Story) -> None:
        asked, uuid = story.asked, story.uuid
        request = await self._insist(lambda: asked.submit(client, uuid))
        story.note()
        await self._read(request, story)
        story.finish_reason = request.finish_reason
        await self._judge(story, Answer.of(request, story.tokens), keys.request_id("default", uuid))
        await self._insist(request.release)

    async def _read(self, request: AsyncRequest, story: Story) -> None:
        try:
            async for tokens in request.stream():
                story.tokens += tokens
                story.note()
                if 0 < story.asked.stop_after <= len(story.tokens):
                    await self._insist(request.stop)
        except RequestInterrupted:
            pass  # the judge looks at the reason
        story.ended_at = story.note()

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """A denial is an answer, not a failure: nothing was accepted, and the client may come again."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await call()
            except StatusError as e:
                if e.status != pb.ALLSPARK_REQUEST_DENIED or time.monotonic() > until:
                    raise
                self.denied += 1
                await asyncio.sleep(max(0.1, e.retry_after_ms / 1000))  # as the denial asks

    async def _judge(self, story: Story, answer: Answer, rid: str) -> None:
        """What the client got and what the raw stream holds, against the quiet run's answer."""
        entries = await self._store.command("XRANGE", keys.stream(rid), "-", "+")
        found = [records.decode(fields[1]) for _, fields in entries]
        deaths, of = await self._store.command("HMGET", keys.request(rid), "dt", "de")
        story.deaths = int(deaths or 0)
        story.dead_workers = tuple(death.partition("=")[2] for death in (of or b"").decode().split())
        expected = self._workload.expected(story.asked)
        if answer.finish_reason not in ("stopped", "poison"):
            if difference := answer.difference(expected):
                self._complain(story, difference)
        elif not answer.is_beginning_of(expected):
            self._complain(story, f"got {answer.tokens}, not the beginning of {expected.tokens}")
        elif not self._may_be_short(story):
            self._complain(
                story, f"ended with reason {story.finish_reason!r} after {len(story.tokens)} tokens"
            )
        if records.tokens_of(found) != story.tokens:
            self._complain(
                story, f"the stream holds {records.tokens_of(found)}, its client got {story.tokens}"
            )
        if [r.is_terminal for r in found] != [False] * (len(found) - 1) + [True]:
            self._complain(story, f"not exactly one terminal record at the end of {len(found)}")
        if [r.position for r in found] != [0, *(r.end for r in found[:-1])]:
            self._complain(story, f"positions {[(r.position, r.end) for r in found]} are not contiguous")

    @staticmethod
    def _may_be_short(story: Story) -> bool:
        """Its client stopped it, or it ran twice on a worker that died (rule of quarantine)."""
        if story.finish_reason == "stopped":
            return 0 < story.asked.stop_after <= len(story.tokens)
        return story.finish_reason == "poison" and story.deaths >= 2

    def _complain(self, story: Story, what: str) -> None:
        self.complaints.append(f"request {story.index}: {what}")
