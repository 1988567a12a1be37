"""A gateway denies by itself while a broker's word of a full queue holds; never what was accepted."""

from collections.abc import AsyncIterator

import pytest
from allspark_gateway import main
from allspark_gateway.denials import MAX_FULL, MAX_HOLD_S, Denials
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from allspark_proto import metadata

from .conftest import Client, Gateways, Producer, ScriptedBroker

MIDDLE = 0.5


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client(gateways: Gateways, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """Of a gateway whose hold on denials does not end by itself."""
    monkeypatch.setattr(main, "Denials", lambda: Denials(clock, lambda: MIDDLE))
    yield gateways.client(await gateways.open())


def start(uuid: str = "", model: str = "m") -> pb.StartRequestRequest:
    return pb.StartRequestRequest(model_name=model, config=pb.GenerateConfig(uuid=uuid, max_length=9))


def full(full_for_ms: int = 50) -> fleet.Reply:
    return fleet.Reply(
        as_status=pb.ALLSPARK_REQUEST_DENIED, reason="full", retry_after_ms=400, full_for_ms=full_for_ms
    )


def asked(broker: ScriptedBroker) -> int:
    return sum(e.WhichOneof("call") == "start_request" for e in broker.envelopes)


async def submit(client: Client, uuid: str = "", model: str = "m", priority: int = 0) -> tuple[int, str]:
    """Status and hint."""
    reply, trailing = await client.call(
        "StartRequest", start(uuid, model), [(metadata.PRIORITY, str(priority))]
    )
    return reply.as_status, trailing.get(metadata.RETRY_AFTER_MS, "")


async def test_the_word_of_the_broker_is_taken_for_as_long_as_it_holds(
    client: Client, broker: ScriptedBroker, clock: Clock
) -> None:
    broker.scripts["start_request"] = lambda e: full() if e.start_request.model_name == "m" else fleet.Reply()
    denied = (pb.ALLSPARK_REQUEST_DENIED, "400")
    assert [await submit(client, uuid) for uuid in ("", "u", "v")] == [denied] * 3
    assert asked(broker) == 1, "the first one told"
    assert await submit(client, model="other") == (0, "")
    assert (await submit(client, priority=5))[0] == pb.ALLSPARK_REQUEST_DENIED
    assert asked(broker) == 3, "another model, and a request that goes before the others"
    clock.now += 0.051
    broker.answers("start_request")
    assert await submit(client, "u") == (0, "")
    assert sum(e.denied_before for e in broker.envelopes) == 2, "the broker is told how many"


async def test_a_denial_without_a_time_is_no_word_about_others(
    client: Client, broker: ScriptedBroker
) -> None:
    broker.scripts["start_request"] = lambda _: full(0)
    for _ in range(3):
        assert (await submit(client))[0] == pb.ALLSPARK_REQUEST_DENIED
    assert asked(broker) == 3


async def test_a_retry_of_an_accepted_request_still_gets_its_answer(
    client: Client, broker: ScriptedBroker, producer: Producer
) -> None:
    await producer.admit("accepted")
    broker.scripts["start_request"] = lambda e: (
        fleet.Reply() if e.start_request.config.uuid == "accepted" else full()
    )
    assert (await submit(client))[0] == pb.ALLSPARK_REQUEST_DENIED
    assert await submit(client, "accepted") == (0, "")


async def test_who_ends_a_request_makes_room(client: Client, broker: ScriptedBroker) -> None:
    broker.scripts["start_request"] = lambda _: full()
    await submit(client)
    broker.answers("start_request")
    assert (await submit(client))[0] == pb.ALLSPARK_REQUEST_DENIED
    await client.call("ReleaseRequest", pb.StopRequestRequest(model_name="m", uuid="other"))
    assert await submit(client) == (0, "")


def test_the_hold_and_the_number_of_models_are_bounded() -> None:
    clock = Clock()
    denials = Denials(clock, lambda: MIDDLE)
    for n in range(3 * MAX_FULL):
        denials.note(fleet.Envelope(start_request=start(model=f"m{n}")), full(10**9))
        assert len(denials) <= MAX_FULL
    assert denials.denial("", f"m{3 * MAX_FULL - 1}", 0) is not None
    clock.now += MAX_HOLD_S
    assert denials.denial("", f"m{3 * MAX_FULL - 1}", 0) is None


def test_one_tenants_full_queue_is_no_word_about_another() -> None:
    denials = Denials(Clock(), lambda: MIDDLE)
    denials.note(fleet.Envelope(tenant="a", start_request=start()), full())
    assert denials.denial("a", "m", 0) is not None
    assert denials.denial("b", "m", 0) is None
    denials.note(fleet.Envelope(tenant="b", start_request=start()), fleet.Reply())
    denials.made_room("b", "m")
    assert denials.denial("a", "m", 0) is not None
