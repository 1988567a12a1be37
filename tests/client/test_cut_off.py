"""A gateway behind a network that says nothing any more, or little: cut off, and slow."""

import asyncio
from collections.abc import Iterator

import pytest
from allspark.client import AsyncClient, Client
from allspark.client.calls import MAX_PATIENCE, Attempts, Route, channel_options
from allspark_gateway.listeners import MIN_CLIENT_PING_MS
from grpc import StatusCode

from tests.client.fake_fleet import FakeFleet
from tests.client.test_client import Driver
from tests.network.proxy import FAULTS, Link, Network

LONG_S = 1000.0
TOKENS = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(params=["sync", "asyncio"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(autouse=True)
def only_signs_of_life_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other limit, and these soon."""
    for module in ("sync", "aio"):
        monkeypatch.setattr(f"allspark.client.{module}.GET_WAIT_S", LONG_S)
    monkeypatch.setattr("allspark.client.calls.SILENT_S", 0.2)
    monkeypatch.setattr("allspark.client.calls.ANSWER_S", 0.3)
    monkeypatch.setattr("allspark.client.calls.SILENCE_S", 0.4)


@pytest.mark.parametrize("fault", ["cut", "cut-down"])
def test_a_gateway_that_was_cut_off_is_left_although_nothing_says_so(
    driver: Driver, network: Network, fault: str
) -> None:
    fleet = FakeFleet(2)
    proxies = [network.proxy("gateway", address) for address in fleet.addresses]

    def read(client: Client) -> list[int]:
        client.version()
        proxies[0].set(FAULTS[fault])
        return client.submit("m", [1], uuid="u").result()

    async def read_async(client: AsyncClient) -> list[int]:
        await client.version()
        proxies[0].set(FAULTS[fault])
        async with asyncio.timeout(45):  # by default gRPC gives up after a minute or more
            return await (await client.submit("m", [1], uuid="u")).result()

    addresses = [proxy.address for proxy in proxies]
    do = read if driver.kind == "sync" else read_async
    assert driver.call(addresses, do, timeout_s=LONG_S, retry_s=LONG_S) == TOKENS
    assert {index for index, name in fleet.calls if name == "Get"} == {1}
    fleet.close()


def test_what_takes_long_because_the_link_is_slow_gets_through(driver: Driver, network: Network) -> None:
    """The sign of life comes after what is on its way; it is waited for longer each time."""
    fleet = FakeFleet(1)
    proxy = network.proxy("gateway", fleet.addresses[0])
    proxy.set(Link(bytes_per_s=200_000))
    prompt = [7] * 40_000  # of 8 bytes

    def submit(client: Client) -> str:
        return client.submit("m", prompt, uuid="u").uuid

    async def submit_async(client: AsyncClient) -> str:
        return (await client.submit("m", prompt, uuid="u")).uuid

    do = submit if driver.kind == "sync" else submit_async
    assert driver.call([proxy.address], do, timeout_s=LONG_S, retry_s=LONG_S) == "u"
    assert len(fleet.started[0].inputs.tensor_map["input_ids"].data) == 320_000
    fleet.close()


def test_patience_grows_with_each_round_of_silence_and_not_with_refusals() -> None:
    now = [0.0]
    attempts = Attempts("X", Route(["a", "b"], retry_s=LONG_S), clock=lambda: now[0])
    places = []
    for seconds in (0.1, 5.0, 5.0, 0.1, 5.0, 5.0, *[9.0] * 10):
        places.append(attempts.place())
        now[0] += seconds
        attempts.failed(places[-1][0], StatusCode.UNAVAILABLE, "")
    assert places[:7] == [("a", 0), ("b", 0), ("a", 0), ("b", 1), ("a", 1), ("b", 1), ("a", 2)]
    assert places[-1][1] == MAX_PATIENCE


def test_a_gateway_does_not_mind_how_often_clients_ask_for_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert dict(channel_options())["grpc.keepalive_time_ms"] >= 1.5 * MIN_CLIENT_PING_MS
