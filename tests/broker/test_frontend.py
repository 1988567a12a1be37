"""The door for clients: whom a client stays with."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio
from allspark_broker.access import FRONTEND, Access
from allspark_broker.frontend import PROGRESS_S, Frontend
from allspark_broker.settings import BrokerSettings
from allspark_bus import sockets
from allspark_bus.broker_client import BrokerClient
from allspark_proto import fleet_pb2 as fleet

PATIENCE_S = 30.0


class Door:
    """A frontend that serves; its answers wait for `go_on`."""

    def __init__(self, context: zmq.asyncio.Context, name: str, *, is_stuck: bool) -> None:
        socket, self.endpoint = sockets.router(context, "tcp://127.0.0.1:0", door=FRONTEND)
        self.name, self.asked, self.go_on = name, 0, asyncio.Event()
        self.go_on.set()
        access = Access(BrokerSettings(), context)
        self.frontend = Frontend(socket, access, self._execute, lambda: is_stuck)
        self.tasks = [asyncio.ensure_future(self.frontend.serve()), asyncio.ensure_future(self._progress())]

    async def _execute(self, envelope: fleet.Envelope) -> fleet.Reply:
        self.asked += 1
        await self.go_on.wait()
        return fleet.Reply(correlation_id=envelope.correlation_id, reason=self.name)

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)  # as the duty of a broker
            await self.frontend.show_progress()


@pytest.fixture
async def doors() -> AsyncIterator[Callable[..., Door]]:
    context, made = zmq.asyncio.Context(), []

    def make(name: str, *, is_stuck: bool = False) -> Door:
        made.append(Door(context, name, is_stuck=is_stuck))
        return made[-1]

    yield make
    for door in made:
        await door.frontend.finish(0)
        for task in door.tasks:
            task.cancel()
        await asyncio.gather(*door.tasks, return_exceptions=True)
    context.destroy(linger=0)


@pytest.mark.parametrize("is_stuck", [True, False])
async def test_a_client_leaves_a_broker_that_gets_on_with_nothing(
    doors: Callable[..., Door], is_stuck: bool
) -> None:
    first, second = doors("first", is_stuck=is_stuck), doors("second")
    client = BrokerClient([first.endpoint, second.endpoint])

    async def ask() -> str:
        client._preferred = 0
        call = fleet.Envelope(get_fleet_status=fleet.GetFleetStatus())
        return (await client.call(call, PATIENCE_S)).reason

    async with asyncio.timeout(PATIENCE_S):
        while await ask() != first.name:
            pass  # it is not connected yet
        first.go_on.clear()
        first.asked = 0
        answer = asyncio.ensure_future(ask())
        while not first.asked:
            await asyncio.sleep(0.01)  # polling: ZeroMQ tells nobody what arrived
        if not is_stuck:
            first.go_on.set()
        assert await answer == (second.name if is_stuck else first.name)
    await client.close()
