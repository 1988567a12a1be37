"""Records in Redis damaged by hand: whose record it is fails, or survives; nobody else notices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import pytest
from allspark_bus import keys
from allspark_bus.errors import Damaged
from allspark_proto import allspark_service_pb2 as pb
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fleet.harness import request
from tests.fleet.scripted_engine import expected_tokens
from tests.fuzz.fleet_bench import Bench, open_bench
from tests.fuzz.fuzzing import fuzz

SUCCESS, ILLEGAL = pb.ALLSPARK_SUCCESS, pb.ALLSPARK_ILLEGAL_REQUEST_ID
LONG = 30

Command = tuple[str | bytes, ...]


class Damage(NamedTuple):
    """What is done to a request's keys: `HASH` and `STREAM` stand for their names."""

    commands: tuple[Command, ...]


@pytest.fixture(scope="module")
def bench(valkey_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if valkey_server.process is None:
        valkey_server.start()
    with open_bench(valkey_server.url, tmp_path_factory.mktemp("models")) as made:
        yield made


async def inflict(bench: Bench, uuid: str, damage: Damage) -> None:
    names = {"HASH": keys.request(f"default/{uuid}"), "STREAM": keys.stream(f"default/{uuid}")}
    for command in damage.commands:
        if command[0] == "SET":  # of whatever type it was
            await bench.fleet.store.command("DEL", names[str(command[1])])
        with contextlib.suppress(Damaged):  # what is no hash any more has no fields to damage
            await bench.fleet.store.command(*(names.get(str(part), part) for part in command))


async def survives(bench: Bench, damage: Damage, generated: int, new: int) -> None:
    """Damages one of two requests after so many tokens, asks everything about it, uses its uuid again."""
    number = next(bench.serial)
    victim, neighbour = f"victim-{number}", f"neighbour-{number}"
    prompts = [number + 1, 2, 3], [number + 1, 4]
    await bench.start(neighbour, prompts[1], LONG)
    await bench.start(victim, prompts[0], new)
    await bench.fleet.generated(victim, generated)
    await inflict(bench, victim, damage)
    uuid, names = pb.UUID(uuid=victim), pb.StopRequestRequest(uuid=victim)
    await bench.stub.GeneratedLength(uuid, timeout=60)
    await bench.stub.GetNoWait(uuid, timeout=60)
    await bench.stub.StartRequest(request(victim, prompts[0], new), timeout=60)
    await bench.until_over(victim)
    await bench.stub.StopRequest(names, timeout=60)
    released = await bench.stub.ReleaseRequest(names, timeout=60)
    assert released.as_status in (SUCCESS, ILLEGAL), damage
    assert await bench.tokens(neighbour) == expected_tokens(prompts[1], LONG)
    await bench.start(victim, prompts[0], 9)
    assert await bench.tokens(victim) == expected_tokens(prompts[0], 9), damage
    for name in (victim, neighbour):
        await bench.stub.ReleaseRequest(pb.StopRequestRequest(uuid=name), timeout=60)
    bench.check_alive()


JUNK = [
    b"",
    b"x",
    b"-1",
    b"1e999",
    b"nan",
    b"9999",
    b"99999999999999999999",
    b"\xff\xfe",
    b"ended",
    b"open",
    b"1.5",
]
FIELDS = [
    "st",
    "dg",
    "body",
    "md",
    "ep",
    "wk",
    "cr",
    "dl",
    "pr",
    "n",
    "cur",
    "dt",
    "de",
    "tb",
    "rt",
    "tt",
    "rs",
    "es",
    "ot",
]
RECORD = {"v": 1, "e": 1, "p": 0, "t": [1, 2]}
ENTRIES = [
    b"",
    b"\xc1",
    b"no msgpack",
    *(msgpack.packb(RECORD | more) for more in ({"v": 2}, {"t": "ab"}, {"p": 7})),
]
ENTRIES += [bytes(msgpack.packb(RECORD | {"e": -1})), bytes(msgpack.packb(RECORD | {"o": {"text": "x"}}))]
KEYS = ["HASH", "STREAM"]
commands = st.one_of(
    st.tuples(st.just("HSET"), st.just("HASH"), st.sampled_from(FIELDS), st.sampled_from(JUNK)),
    st.tuples(st.just("HDEL"), st.just("HASH"), st.sampled_from(FIELDS)),
    st.tuples(
        st.just("XADD"),
        st.just("STREAM"),
        st.just("*"),
        st.sampled_from(["m", "x"]),
        st.sampled_from(ENTRIES),
    ),
    st.tuples(st.just("XTRIM"), st.just("STREAM"), st.just("MAXLEN"), st.sampled_from(["0", "1"])),
    st.tuples(st.just("DEL"), st.sampled_from(KEYS)),
    st.tuples(st.just("SET"), st.sampled_from(KEYS), st.sampled_from(JUNK)),
)
damages = st.lists(commands, min_size=1, max_size=2).map(lambda found: Damage(tuple(found)))


def one(*command: str | bytes) -> Damage:
    return Damage((command,))


@fuzz(3)
@given(damage=damages, generated=st.sampled_from([0, 1, 5, LONG]))
@example(damage=one("SET", "STREAM", "x"), generated=5)
@example(damage=one("SET", "HASH", "x"), generated=5)
@example(damage=one("HSET", "HASH", "n", "9999"), generated=5)
@example(damage=one("HSET", "HASH", "n", "1.5"), generated=5)
@example(damage=one("HSET", "HASH", "n", "-1"), generated=5)
@example(damage=one("HSET", "HASH", "n", "nan"), generated=5)
@example(damage=one("XADD", "STREAM", "*", "m", msgpack.packb(RECORD | {"v": 2})), generated=5)
@example(damage=one("HDEL", "HASH", "rt"), generated=5)
@example(damage=one("XTRIM", "STREAM", "MAXLEN", "0"), generated=LONG)
def test_a_damaged_request_harms_nobody_else(damage: Damage, generated: int, bench: Bench) -> None:
    bench.run(survives(bench, damage, generated, LONG))


@pytest.mark.parametrize(
    "entry", [b"\xc1", msgpack.packb(RECORD | {"v": 2})], ids=["no record", "another version"]
)
def test_a_request_that_cannot_be_resumed_ends_and_the_others_go_on(entry: bytes, bench: Bench) -> None:
    async def run() -> None:
        number = next(bench.serial)
        uuids = [f"victim-{number}", f"neighbour-{number}"]
        for index, uuid in enumerate(uuids):
            await bench.start(uuid, [number + 1, index], 400)
            await bench.fleet.generated(uuid, 3)
        bench.fleet.workers.pop().kill()
        await inflict(bench, uuids[0], one("XADD", "STREAM", "399-0", "m", entry))
        bench.fleet.start_worker()
        assert await bench.until_over(uuids[0]) == pb.GenerateInterrupted
        assert await bench.tokens(uuids[1]) == expected_tokens([number + 1, 1], 400)
        for uuid in uuids:
            await bench.stub.ReleaseRequest(pb.StopRequestRequest(uuid=uuid), timeout=60)
        bench.check_alive()

    bench.run(run())


MODEL = keys.model("other")
MODEL_DAMAGE: list[Command] = [
    ("HSET", MODEL, "state", "asleep"),
    ("HSET", MODEL, "gen", "x"),
    ("HSET", MODEL, "cfg", b"\xff\xff"),
    ("HSET", MODEL, "facts", b"\xff\xff"),
    ("HSET", MODEL, "prev", b"\xc1"),
    (
        "HSET",
        MODEL,
        "cfg",
        pb.ModelStructConfig(model_name="other", compute_unit="TPU:x").SerializeToString(),
    ),
    ("HDEL", MODEL, "state"),
    ("DEL", MODEL),
    ("SET", MODEL, "x"),
    ("SADD", keys.MODELS, b"\xff"),
]


def test_a_damaged_model_harms_no_other_and_can_be_built_again(bench: Bench) -> None:
    async def run() -> None:
        bench.fleet.write_model("other.json", step_s=0.0, max_batch=8)
        for command in MODEL_DAMAGE:
            number = next(bench.serial)
            await bench.fleet.build_and_start("other", "other.json")
            if command[0] == "SET":
                await bench.fleet.store.command("DEL", MODEL)
            await bench.fleet.store.command(*command)
            await bench.start(f"m-{number}", [number], 5)
            assert await bench.tokens(f"m-{number}") == expected_tokens([number], 5), command
            released = await bench.fleet.call(release_model=pb.ModelName(model_name="other"))
            assert released.as_status == SUCCESS or command[0] == "DEL", (command, released.reason)
            await bench.fleet.build_and_start("other", "other.json")
            await bench.start(f"o-{number}", [number], 5, "other")
            assert await bench.tokens(f"o-{number}") == expected_tokens([number], 5), command
            for uuid in (f"m-{number}", f"o-{number}"):
                await bench.stub.ReleaseRequest(pb.StopRequestRequest(uuid=uuid), timeout=60)
            bench.check_alive()

    bench.run(run())
