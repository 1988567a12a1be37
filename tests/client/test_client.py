"""The blocking and the asyncio client: exactly-once reading, going on elsewhere, errors with reasons."""

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from allspark.client import (
    AllSparkError,
    AsyncClient,
    AsyncRequest,
    Client,
    FleetUnavailable,
    GenerateOptions,
    RequestInterrupted,
    StatusError,
)
from allspark.client import calls as client_calls
from allspark.client.calls import Attempts, Route
from allspark_proto import allspark_service_pb2 as pb
from fake_fleet import FakeFleet, Script


@asynccontextmanager
async def _submitted(client: AsyncClient, options: GenerateOptions | None) -> AsyncIterator[AsyncRequest]:
    async with await client.submit("m", [5, 6], options, "u") as request:
        yield request


class Driver:
    """Runs the same scenario with either client."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def collect(
        self, addresses: list[str], options: GenerateOptions | None = None, **limits: float
    ) -> tuple[list[list[int]], str]:
        """Submit a prompt, read to the end: the chunks and the finish reason."""
        if self.kind == "sync":
            with Client(addresses, **limits) as client, client.submit("m", [5, 6], options, "u") as request:
                return list(request.stream()), request.finish_reason
        return asyncio.run(self._collect(addresses, options, limits))

    async def _collect(
        self, addresses: list[str], options: GenerateOptions | None, limits: dict[str, float]
    ) -> tuple[list[list[int]], str]:
        async with AsyncClient(addresses, **limits) as client, _submitted(client, options) as request:
            return [ids async for ids in request.stream()], request.finish_reason

    def call(self, addresses: list[str], do: Callable[[Any], Any], **limits: float) -> Any:
        """Run one method of a client."""
        if self.kind == "sync":
            with Client(addresses, **limits) as client:
                return do(client)

        async def run() -> Any:
            async with AsyncClient(addresses, **limits) as client:
                return await do(client)

        return asyncio.run(run())


@pytest.fixture(params=["sync", "asyncio"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fake = FakeFleet(2)
    yield fake
    fake.close()


def test_stream_gives_every_token_once_and_the_reason(driver: Driver, fleet: FakeFleet) -> None:
    chunks, reason = driver.collect(fleet.addresses)

    assert chunks == [[1, 2, 3], [4, 5, 6], [7]]
    assert reason == "eos"
    assert fleet.released == ["u"]


def test_end_without_new_tokens(driver: Driver, fleet: FakeFleet) -> None:
    fleet.next_script = lambda: Script([], "stopped")
    assert driver.collect(fleet.addresses) == ([], "stopped")


def test_lost_answers_are_read_again(driver: Driver, fleet: FakeFleet) -> None:
    fleet.lose(3)  # the server's own cursor has moved; only the client's knows what arrived
    chunks, _ = driver.collect(fleet.addresses)
    assert [token for ids in chunks for token in ids] == [1, 2, 3, 4, 5, 6, 7]


def test_lost_answer_of_a_submit_starts_one_request(driver: Driver, fleet: FakeFleet) -> None:
    fleet.failures["StartRequest"] = [grpc.StatusCode.UNAVAILABLE]
    chunks, _ = driver.collect(fleet.addresses)

    assert sum(map(len, chunks)) == 7
    assert [started.config.uuid for started in fleet.started] == ["u", "u"]
    assert fleet.started[0] == fleet.started[1]


def test_another_gateway_serves_the_same_uuid(driver: Driver, fleet: FakeFleet) -> None:
    fleet.stop_gateway(0)
    chunks, _ = driver.collect(fleet.addresses)
    assert sum(map(len, chunks)) == 7
    assert {index for index, _ in fleet.calls} == {1}


def test_frozen_gateway_is_left_behind(
    driver: Driver, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sync", "aio"):
        monkeypatch.setattr(f"allspark.client.{module}.GET_WAIT_S", 0.2)
    fleet.frozen = {0}
    chunks, _ = driver.collect(fleet.addresses)

    assert sum(map(len, chunks)) == 7
    assert fleet.calls[0] == (0, "StartRequest")
    assert [index for index, name in fleet.calls if name == "Get"][-1] == 1


def test_no_gateway_at_all(driver: Driver) -> None:
    fake = FakeFleet(1)
    fake.close()
    with pytest.raises(FleetUnavailable, match=f"no answer from {fake.addresses[0]} for 0.3 s"):
        driver.call(fake.addresses, lambda client: client.version(), retry_s=0.3)


def test_errors_that_no_retry_mends_are_raised_at_once(driver: Driver, fleet: FakeFleet) -> None:
    fleet.failures["GetVersionFull"] = [grpc.StatusCode.INTERNAL]
    with pytest.raises(AllSparkError, match="scripted INTERNAL"):
        driver.call(fleet.addresses, lambda client: client.version())
    assert len(fleet.calls) == 1


def test_refusal_has_status_reason_and_hint(driver: Driver, fleet: FakeFleet) -> None:
    fleet.refusal = (pb.ALLSPARK_REQUEST_DENIED, "the queue of model 'm' is full – 4096 wait")
    with pytest.raises(StatusError, match=r"is full – 4096 wait \(ALLSPARK_REQUEST_DENIED\)") as raised:
        driver.collect(fleet.addresses)
    assert raised.value.status == 12
    assert raised.value.retry_after_ms == 250


def test_unknown_status_number_is_shown(driver: Driver, fleet: FakeFleet) -> None:
    fleet.refusal = (23, "no such adapter")
    with pytest.raises(StatusError, match="AS_STATUS 23"):
        driver.collect(fleet.addresses)


def test_failed_build_is_an_error(driver: Driver, fleet: FakeFleet) -> None:
    driver.call(fleet.addresses, lambda client: client.build_model("m", "/models/there"))
    with pytest.raises(StatusError, match="IO_ERROR"):
        driver.call(fleet.addresses, lambda client: client.build_model("m", "/models/missing"))


def test_interruption_comes_after_the_tokens(driver: Driver, fleet: FakeFleet) -> None:
    script = Script([1, 2, 3, 4], "poison")
    script.message = "two workers died of it"
    fleet.next_script = lambda: script
    received: list[int] = []

    def read(client: Client) -> None:
        for ids in client.submit("m", [1], uuid="u").stream():
            received.extend(ids)

    async def read_async(client: AsyncClient) -> None:
        async for ids in (await client.submit("m", [1], uuid="u")).stream():
            received.extend(ids)

    with pytest.raises(RequestInterrupted, match=r"interrupted \(poison\): two workers died of it") as raised:
        driver.call(fleet.addresses, read if driver.kind == "sync" else read_async)
    assert raised.value.finish_reason == "poison"
    assert received == [1, 2, 3, 4]


def test_unknown_uuid(driver: Driver, fleet: FakeFleet) -> None:
    def read(client: Any) -> Any:
        return client.attach("m", "never-seen").result()

    with pytest.raises(StatusError, match="never-seen is unknown"):
        driver.call(fleet.addresses, read)


def test_attach_goes_on_where_another_reader_was(driver: Driver, fleet: FakeFleet) -> None:
    fleet.scripts["u"] = Script([1, 2, 3, 4, 5])
    assert driver.call(fleet.addresses, lambda client: client.attach("m", "u", received=4).result()) == [5]


def test_releasing_what_is_gone_is_fine(driver: Driver, fleet: FakeFleet) -> None:
    driver.call(fleet.addresses, lambda client: client.attach("m", "expired").release())
    assert fleet.released == ["expired"]


@pytest.mark.parametrize("reason", ["eos", "interrupted"])
def test_server_without_our_metadata(driver: Driver, reason: str) -> None:
    """Any AllSpark service: an empty answer means the end, GenerateStatus says which."""
    fake = FakeFleet(1, has_metadata=False)
    fake.next_script = lambda: Script([1, 2, 3, 4], reason)
    try:
        if reason == "eos":
            assert driver.collect(fake.addresses) == ([[1, 2, 3], [4]], "stopped")
        else:
            with pytest.raises(RequestInterrupted):
                driver.collect(fake.addresses)
    finally:
        fake.close()


def test_caller_can_limit_the_wait(fleet: FakeFleet) -> None:
    fleet.failures["Get"] = [grpc.StatusCode.DEADLINE_EXCEEDED] * 5
    with Client(fleet.addresses) as client:
        request = client.submit("m", [1], uuid="u")
        with pytest.raises(TimeoutError, match=r"no token for 0\.2 s"):
            request.result(timeout_s=0.2)
        fleet.failures.clear()
        assert request.result() == [1, 2, 3, 4, 5, 6, 7]


def test_stop(driver: Driver, fleet: FakeFleet) -> None:
    driver.call(fleet.addresses, lambda client: client.attach("m", "u").stop())
    assert fleet.stopped == ["u"]


def test_own_error_of_the_caller_is_not_hidden_by_a_failing_release(fleet: FakeFleet) -> None:
    class Mine(Exception):
        pass

    fleet.failures["ReleaseRequest"] = [grpc.StatusCode.INTERNAL]
    with Client(fleet.addresses) as client, pytest.raises(Mine), client.submit("m", [1], uuid="u"):
        raise Mine


def test_message_of_a_prompt(fleet: FakeFleet) -> None:
    options = GenerateOptions(
        max_new_tokens=10,
        eos_token_id=2,
        stop_words_ids=[[7, 8], [9]],
        bad_words_ids=[[3]],
        do_sample=True,
        seed=11,
        response_format={"type": "json_object"},
    )
    with Client(fleet.addresses) as client:
        client.submit("m", [5, -1, 2**62], options)
    sent = fleet.started[0]
    tensor = sent.inputs.tensor_map["input_ids"]
    ids = array("q", tensor.data)
    if sys.byteorder == "big":
        ids.byteswap()
    assert (list(ids), list(tensor.shape.dims), tensor.data_type) == ([5, -1, 2**62], [1, 3], pb.INT64)
    assert len(sent.config.uuid) == 32
    assert (sent.config.max_length, sent.config.eos_token_id, sent.config.early_stopping) == (13, 2, True)
    assert [list(word.word) for word in sent.config.stop_words_ids.ids] == [[7, 8], [9]]
    assert [list(word.word) for word in sent.config.bad_words_ids.ids] == [[3]]
    assert (sent.config.do_sample, sent.config.seed) == (True, 11)
    assert dict(sent.config.response_format) == {"type": "json_object"}


def test_no_eos_token_means_no_early_stopping() -> None:
    config = GenerateOptions().to_config("u", 1)
    assert (config.eos_token_id, config.early_stopping, config.max_length) == (-1, False, 0)


@pytest.mark.parametrize(
    "options", [GenerateOptions(max_new_tokens=1, max_length=5), GenerateOptions(max_new_tokens=0)]
)
def test_contradicting_lengths(options: GenerateOptions) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        options.to_config("u", 1)


def test_first_round_over_all_addresses_is_immediate_then_slower() -> None:
    now = [0.0]
    attempts = Attempts("X", Route(["a", "b"], retry_s=10.0), clock=lambda: now[0])
    code = grpc.StatusCode.UNAVAILABLE
    delays = [attempts.failed(attempts.route.current, code, "") for _ in range(12)]

    assert delays[:1] == [0.0]
    assert delays == sorted(delays)
    assert delays[-1] == client_calls._MAX_DELAY_S
    now[0] = 10.0
    with pytest.raises(FleetUnavailable):
        attempts.failed("a", code, "")


def test_one_failure_seen_by_two_callers_moves_one_address_on() -> None:
    route = Route(["a", "b", "c"], retry_s=1.0)
    route.leave("a")
    route.leave("a")
    assert route.current == "b"
    with pytest.raises(ValueError, match="at least one"):
        Route([], retry_s=1.0)


def test_many_requests_share_one_client(fleet: FakeFleet) -> None:
    async def run() -> list[list[int]]:
        async with AsyncClient(fleet.addresses) as client:
            requests = await asyncio.gather(*(client.submit("m", [1]) for _ in range(20)))
            return await asyncio.gather(*(request.result() for request in requests))

    assert asyncio.run(run()) == [[1, 2, 3, 4, 5, 6, 7]] * 20
