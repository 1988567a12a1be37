"""Traffic of every sort, for as long as told: what clients do well, badly, or not at all."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from allspark.client import (
    AllSparkError,
    AsyncClient,
    AsyncRequest,
    ModelOptions,
    RequestInterrupted,
    StatusError,
)
from allspark_bus.broker_client import BrokerClient
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import metadata

from tests.chaos.workload import Ask, ServedModel

PATIENCE_S = 60.0
TURNS = 50  # what a client does before another one takes its place
SOON = ((metadata.DEADLINE_MS, "30"),)
#: What a client may be told without anything being wrong: a result that it was too slow to read is gone.
EXPECTED = {pb.ALLSPARK_REQUEST_DENIED: "denied", pb.ALLSPARK_ILLEGAL_REQUEST_ID: "expired before read"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the fleet is and what it serves."""

    addresses: Sequence[str]
    frontends: Sequence[str]
    served: ServedModel
    adapters: Sequence[str]


class Traffic:
    """`ask` makes a request; `counts` says what was done, `complaints` what should not have happened.

    `rate` requests are begun in a second, at most: levels that depend on it must not follow the machine.
    """

    def __init__(self, place: Place, ask: Callable[[random.Random], Ask], seed: int, rate: float) -> None:
        self._interval_s = 1 / rate
        self._turn_s = 0.0  # when the next one may begin
        self._place = place
        self._ask = ask
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._until = 0.0
        self._wanted = 0
        self._idle: list[AsyncClient] = []
        self._producer = BrokerClient(place.frontends)
        self.counts: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._habits: dict[Callable[[AsyncClient], Awaitable[None]], int] = {
            self._read: 50, self._stop: 8, self._release_early: 6, self._abandon: 6, self._keep: 6,
            self._miss_deadline: 5, self._name_no_model: 3, self._vanish: 4, self._come_anew: 4,
            self._produce: 5, self._adapt: 5,
        }  # fmt: skip

    @property
    def num_requests(self) -> int:
        """How many were begun."""
        return sum(n for habit, n in self.counts.items() if habit.startswith("_"))

    async def connect_idle(self, count: int) -> None:
        """Connections that stay open and do nothing."""
        for _ in range(count):
            client = AsyncClient(self._place.addresses, retry_s=PATIENCE_S)
            await client.version()
            self._idle.append(client)

    async def run(self, seconds: float, clients: int, least: int = 0) -> None:
        """So many clients at once; returns when the last one has finished what it was doing.

        It takes longer than `seconds` if `least` requests have not been begun by then.
        """
        self._until = time.monotonic() + seconds
        self._wanted = self.num_requests + least
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._client(number))
            group.create_task(self._operator())
            group.create_task(self._renew_idle())

    async def close(self) -> None:
        """Ends idle connections."""
        for client in self._idle:
            await client.close()
        await self._producer.close()

    def _goes_on(self) -> bool:
        return time.monotonic() < self._until or self.num_requests < self._wanted

    def _uuid(self) -> str:
        return f"soak-{next(self._numbers)}"

    async def _client(self, number: int) -> None:
        turn = number % len(self._place.addresses)
        addresses = [*self._place.addresses[turn:], *self._place.addresses[:turn]]
        while self._goes_on():
            # A client stays at the gateway that it fled to: new ones keep the load of the two alike.
            async with AsyncClient(addresses, timeout_s=5.0, retry_s=PATIENCE_S) as client:
                for _ in range(TURNS):
                    if not await self._take_turn():
                        return
                    (habit,) = self._rng.choices(list(self._habits), list(self._habits.values()))
                    self.counts[habit.__name__] += 1
                    await self._guarded(habit.__name__, habit(client))

    async def _take_turn(self) -> bool:
        """Waits until this client may begin a request; False once it is time to end."""
        now = time.monotonic()
        turn = self._turn_s = max(now, self._turn_s + self._interval_s)
        await asyncio.sleep(turn - now)  # the pace
        return self._goes_on()

    async def _guarded(self, what: str, deed: Awaitable[None]) -> None:
        try:
            await deed
        except StatusError as e:
            if (name := EXPECTED.get(e.status)) is None:
                self.complaints.append(f"{what}: {e}")
            else:
                self.counts[name] += 1
        except RequestInterrupted as e:
            self.counts[f"interrupted: {e.finish_reason}"] += 1
        except (AllSparkError, FleetError, OSError) as e:
            self.complaints.append(f"{what}: {e!r}")

    # ---- what clients do --------------------------------------------------------------------------

    async def _submit(self, client: AsyncClient, meta: Sequence[tuple[str, str]] = ()) -> AsyncRequest:
        return await self._ask(self._rng).submit(client, self._uuid(), meta)

    async def _read(self, client: AsyncClient) -> None:
        request = await self._submit(client)
        await request.result()
        await request.release()

    async def _stop(self, client: AsyncClient) -> None:
        request = await self._submit(client)
        async for _ in request.stream():
            await request.stop()
        await request.release()

    async def _release_early(self, client: AsyncClient) -> None:
        await (await self._submit(client)).release()

    async def _abandon(self, client: AsyncClient) -> None:
        await self._submit(client)

    async def _keep(self, client: AsyncClient) -> None:
        await (await self._submit(client)).result()

    async def _miss_deadline(self, client: AsyncClient) -> None:
        request = await self._submit(client, SOON)
        try:
            await request.result()
        finally:
            await request.release()

    async def _name_no_model(self, client: AsyncClient) -> None:
        try:
            await client.submit(f"nobody-{next(self._numbers)}", [1, 2, 3])
        except StatusError as e:
            if e.status != pb.ALLSPARK_PARAM_ERROR:
                raise

    async def _vanish(self, _: AsyncClient) -> None:
        """As a process that is killed: its call is cut off, its request stays behind."""
        async with AsyncClient(self._place.addresses, retry_s=PATIENCE_S) as client:
            request = await self._submit(client)
            reading = asyncio.ensure_future(request.result())
            await asyncio.sleep(self._rng.uniform(0, 0.05))  # its life
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _come_anew(self, _: AsyncClient) -> None:
        async with AsyncClient(self._place.addresses, retry_s=PATIENCE_S) as client:
            await self._read(client)

    async def _adapt(self, client: AsyncClient) -> None:
        asked = self._ask(self._rng)
        options = replace(asked.options, lora_name=self._rng.choice(self._place.adapters))
        request = await replace(asked, options=options).submit(client, self._uuid())
        await request.result()
        await request.release()

    async def _produce(self, _: AsyncClient) -> None:
        """A producer on ZeroMQ with a tenant of its own; half of the time it never releases."""
        uuid = self._uuid()
        message = self._ask(self._rng).message(uuid)
        reply = await self._producer.call(
            fleet.Envelope(tenant=f"t-{uuid}", start_request=message), PATIENCE_S
        )
        if reply.as_status == pb.ALLSPARK_SUCCESS and self._rng.random() < 0.5:
            release = pb.StopRequestRequest(uuid=uuid)
            await self._producer.call(fleet.Envelope(tenant=f"t-{uuid}", release_request=release), PATIENCE_S)

    # ---- what operators do ------------------------------------------------------------------------

    async def _operator(self) -> None:
        """Models with names of their own come and go."""
        async with AsyncClient(self._place.addresses, retry_s=PATIENCE_S) as client:
            while self._goes_on():
                self.counts["models"] += 1
                name = f"model-{next(self._numbers)}"
                await self._guarded("model", self._serve_once(client, name))
                await self._guarded("release of a model", _release(client, name))

    async def _serve_once(self, client: AsyncClient, name: str) -> None:
        served = self._place.served
        options = replace(served.options or ModelOptions(), swap_threshold=0)
        await client.build_model(name, str(served.path), options)
        await client.start_model(name)
        message = self._ask(self._rng).message(self._uuid())
        message.model_name = name
        await client.call("StartRequest", message)
        request = client.attach(name, message.config.uuid)
        await request.result()
        await request.release()
        for call in ("StopModel", "UnloadModelFromDeviceMemory", "ReloadModelToDeviceMemory"):
            await client.call(call, pb.ModelName(model_name=name))

    async def _renew_idle(self) -> None:
        while self._goes_on():
            await asyncio.sleep(0.5)  # how long a connection idles before it is exchanged
            if self._idle:
                self.counts["reconnects"] += 1
                client = self._idle.pop(0)
                await client.close()
                await self._guarded("idle connection", self.connect_idle(1))


async def _release(client: AsyncClient, name: str) -> None:
    """Also of one that was never built: that is refused as an invalid call."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            await client.release_model(name)
            return
        except StatusError as e:
            if e.status == pb.ALLSPARK_INVALID_CALL_ERROR:
                return
            if e.status != pb.ALLSPARK_REQUEST_DENIED or time.monotonic() > until:
                raise
            await asyncio.sleep(0.1)  # it is being stopped
