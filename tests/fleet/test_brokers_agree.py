"""Two brokers of one fleet: what one has done to a model holds at the other at once, not a moment later."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from allspark_bus import keys
from allspark_bus.broker_client import BrokerClient
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from tests.fleet.harness import BROKER, LIMIT_S, MiniFleet, Process, polled, request

OK, PARAM, INVALID, DENIED = 0, 2, 8, 12
ROUNDS = 4  # a copy of the catalogue that happens to be read just in time hides an old one


class TwoBrokers:
    """`here` is the broker of the harness, `there` the other one."""

    def __init__(self, redis: str, directory: Path) -> None:
        self.fleet = MiniFleet(redis, directory)
        self.fleet.write_model()
        self._second = Process(
            sys.executable, "-c", BROKER, f"--redis={redis}", "--frontend=tcp://127.0.0.1:0",
            "--backend=tcp://127.0.0.1:0", "--heartbeat-s=0.1", "--worker-timeout-s=8",
            "--ack-timeout-s=8", "--drain-s=5",
        )  # fmt: skip
        self.fleet.start_worker(f"--broker={self._second.addresses['backend']}")
        self._there = BrokerClient([self._second.addresses["frontend"]])
        self._serial = 0

    async def here(self, action: str) -> int:
        """The status of a call about model "m"."""
        call: dict[str, object] = {f"{action}_model": pb.ModelName(model_name="m")}
        if action == "build":
            call = {"build_model": pb.ModelStructConfig(model_name="m", model_path="m.json")}
        return int((await self.fleet.call(**call)).as_status)

    async def there(self, **call: object) -> fleet.Reply:
        """The other broker's answer."""
        return await self._there.call(fleet.Envelope(**call), LIMIT_S)  # type: ignore[arg-type]

    async def submit_there(self) -> tuple[int, str]:
        """Status and uuid of a request that the other broker is asked to take."""
        self._serial += 1
        uuid = f"u{self._serial}"
        return int((await self.there(start_request=request(uuid, [1, 2], 3))).as_status), uuid

    async def known_there(self) -> tuple[int, bool]:
        """GetRankNums, and whether there is a text about the model."""
        ranks = (await self.there(get_rank_nums=pb.Empty())).rank_nums.rank_id
        about = await self.there(get_model_information=pb.ModelName(model_name="m"))
        return int(ranks), bool(about.model_information.model_info)

    async def all_have_ended(self) -> bool:
        """Whether no request of the model is open."""
        return await self.fleet.ledger.num_open("m") == 0

    async def close(self) -> None:
        await self._there.close()
        self._second.kill()
        await self.fleet.close()


@pytest.fixture
async def two(valkey, tmp_path: Path) -> AsyncIterator[TwoBrokers]:  # type: ignore[no-untyped-def]
    made = TwoBrokers(valkey.url, tmp_path)
    yield made
    await made.close()


async def test_a_model_that_one_broker_changed_takes_no_request_at_the_other(two: TwoBrokers) -> None:
    for _ in range(ROUNDS):
        assert (await two.here("build"), await two.here("start")) == (OK, OK)
        status, uuid = await two.submit_there()
        assert status == OK
        await two.fleet.result(uuid)
        assert (await two.there(release_request=pb.StopRequestRequest(uuid=uuid))).as_status == OK
        assert await two.here("unload") == OK
        assert (await two.submit_there())[0] == INVALID, "unloaded"
        assert (await two.here("reload"), (await two.submit_there())[0]) == (OK, OK)
        await two.here("stop")
        status, refused = await two.submit_there()
        assert status == DENIED, "stopped"
        assert (await two.fleet.streams.view(f"default/{refused}")).outcome != "ok", "it was never accepted"
        assert await two.here("release") == OK
        assert (await two.submit_there())[0] == PARAM, "released"
        await polled(two.all_have_ended)  # the index follows
        await two.there(shutdown_service=pb.Empty())
    left = {key.decode() for key in await two.fleet.store.command("KEYS", "as:open:*")}
    assert keys.open_requests("m") not in left


async def test_a_model_that_one_broker_built_is_known_to_the_other(two: TwoBrokers) -> None:
    for _ in range(ROUNDS):
        assert await two.known_there() == (0, False)
        assert await two.here("build") == OK
        assert await two.known_there() == (1, True)
        assert await two.here("release") == OK
