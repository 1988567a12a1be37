"""DashInfer's protocol through the shim: a hand-made client of the first generation before a fleet."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from allspark.launcher import Fleet
from allspark.shim import ShimSettings, write_directory
from allspark.shim.settings import Target
from allspark_bus import keys
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import dashinfer_v1_pb2 as v1

from tests.fleet.harness import polled, request
from tests.fleet.scripted_engine import expected_tokens

SERVICE = "/allspark.allspark_service.AllSpark/"
PROMPT = [11, 12, 13]
OK, PARAM, RUNTIME, LIMIT, INVALID, ILLEGAL_ID, DENIED = 0, 2, 5, 7, 8, 10, 12
START_TIMEOUT_S = 120.0


class DashClient:
    """A stand-in for a DashInfer program: a process that can be killed, and ClientEngine's calls."""

    def __init__(self, directory: Path, ranks: int = 1) -> None:
        self.program = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        pid = str(self.program.pid)
        argv = ["-mca", "plm_rsh_agent", "false", "--allow-run-as-root"]
        for rank in range(ranks):
            node = ["-n", "1", "numactl", "-m", str(rank), "-N", str(rank)]
            argv += [*([":"] if rank else []), *node, f"{directory}/allspark_daemon", pid, str(rank)]
        hostile = os.environ | {
            "PYTHONPATH": "/nowhere",
            "PYTHONHOME": "/nowhere",
            "PYTHONSTARTUP": "/nowhere",
        }
        self.shim = subprocess.Popen(
            [f"{directory}/mpirun", *argv],
            env=hostile,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.sockets = [Path(f"/tmp/allspark.pid_{pid}_rank_{rank}") for rank in range(ranks)]
        self.channels = [grpc.insecure_channel(f"unix:{path}") for path in self.sockets]

    def call(self, rpc: str, message: Any, answer: Any, rank: int = 0) -> Any:
        """One unary call; waits for a shim that is still starting."""
        method = self.channels[rank].unary_unary(
            SERVICE + rpc, lambda m: m.SerializeToString(), answer.FromString
        )
        return method(message, timeout=START_TIMEOUT_S, wait_for_ready=True)

    def build(self, name: str = "their-name", **config: Any) -> int:
        fields = {"engine_max_length": 512, "prefill_mode": 10, "text_graph": True, "num_threads": 4} | config
        message = v1.ModelStructConfig(
            model_name=name, model_path="/x/m.dimodel", compute_unit="CPU:0", **fields
        )
        return int(self.call("BuildModelFromConfigStruct", message, pb.AsStatus).as_status)

    def model(self, rpc: str, name: str = "their-name") -> int:
        return int(self.call(rpc, pb.ModelName(model_name=name), pb.AsStatus).as_status)

    def serve(self) -> None:
        assert (self.build(), self.model("StartModel")) == (OK, OK)

    def start(self, new: int = 16, uuid: str = "Default-UUID", **config: Any) -> pb.StartRequestResponse:
        message = request(uuid, PROMPT, new, "their-name", top_k=1, do_sample=True, **config)
        answer: pb.StartRequestResponse = self.call("StartRequest", message, pb.StartRequestResponse)
        return answer

    def end(self, rpc: str, uuid: str) -> tuple[int, str]:
        message = pb.StopRequestRequest(model_name="their-name", uuid=uuid)
        answer = self.call(rpc, message, pb.StartRequestResponse)
        return int(answer.as_status), answer.uuid

    def status(self, uuid: str) -> int:
        return int(self.call("GenerateStatus", pb.UUID(uuid=uuid), pb.GenerateRequestStatus).status)

    def get(self, uuid: str, rpc: str = "Get") -> pb.GeneratedElements:
        answer: pb.GeneratedElements = self.call(rpc, pb.UUID(uuid=uuid), pb.GeneratedElements)
        return answer

    def generate(self, new: int = 16, uuid: str = "Default-UUID") -> list[int]:
        """The loop of DashInfer's examples."""
        started = self.start(new, uuid)
        assert started.as_status == OK
        tokens: list[int] = []
        while (status := self.status(started.uuid)) in (pb.Init, pb.Generating):
            element = self.get(started.uuid)
            tokens += [] if element.empty else element.ids_from_generate
        assert status == pb.GenerateFinished
        while not (element := self.get(started.uuid, "GetNoWait")).empty:
            tokens += element.ids_from_generate
        assert self.end("ReleaseRequest", started.uuid) == (OK, started.uuid)
        return tokens

    def leave(self) -> tuple[int, str, str]:
        """Exit status and output of the shim once the program is gone."""
        self.program.kill()
        self.program.wait()
        out, err = self.shim.communicate(timeout=START_TIMEOUT_S)
        return self.shim.returncode, out, err

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.program.kill()
        self.program.wait()
        try:
            self.shim.wait(START_TIMEOUT_S)
        finally:
            self.shim.kill()
        for path in self.sockets:
            path.unlink(missing_ok=True)


@pytest.fixture
def shim_directory(scripted_fleet: Fleet, tmp_path: Path) -> Path:
    settings = ShimSettings(tuple(scripted_fleet.addresses[:1]), {"their-name": Target("m")})
    return write_directory(tmp_path / "shim", settings).parent


@pytest.fixture
def client(shim_directory: Path) -> Iterator[Callable[..., DashClient]]:
    """Makes clients; all have left in the end."""
    with contextlib.ExitStack() as stack:

        def make(ranks: int = 1) -> DashClient:
            made = DashClient(shim_directory, ranks)
            stack.callback(made.close)
            return made

        yield make


async def owned_by_clients(fleet: Fleet) -> list[str]:
    """Request ids in the fleet that came through any shim."""
    store = Store(fleet.redis_url)
    found = await store.command("SMEMBERS", keys.tenant_requests("default"))
    await store.close()
    return [rid.decode() for rid in found if b"dashinfer-" in rid]


def test_the_order_of_calls_that_dashinfers_client_makes(client: Callable[..., DashClient]) -> None:
    c = client()
    assert c.call("GetRankNums", pb.Empty(), pb.RankId).rank_id == 0, "anything else would be shut down"
    assert "/(GitSha1:" in c.call("GetVersionFull", pb.Empty(), pb.VersionInfo).version_info
    files = c.call("GetFileInformation", pb.FileInformationRequest(), pb.FileInformationResponse)
    assert files.create_version_graph == files.create_version_param == files.current_version_engine != ""
    c.serve()
    assert c.call("GetRankNums", pb.Empty(), pb.RankId).rank_id == 1
    assert c.generate(40) == expected_tokens(PROMPT, 40)
    stat = c.call("GetAsEngineStat", pb.ModelName(model_name="their-name"), pb.AsEngineStat)
    assert (stat.model_name, stat.total_generated_token >= 40) == ("their-name", True)
    assert (c.model("StopModel"), c.model("ReleaseModel")) == (OK, OK)
    assert c.call("ShutdownService", pb.Empty(), pb.AsStatus).as_status == OK
    out, err = c.shim.communicate(timeout=START_TIMEOUT_S)
    assert (c.shim.returncode, out, err) == (0, "", ""), "it says nothing of its own"
    assert not c.sockets[0].exists()


def test_clients_that_count_their_uuids_from_zero_do_not_see_each_other(
    client: Callable[..., DashClient],
) -> None:
    clients = [client() for _ in range(4)]
    lengths = [20, 30, 40, 50]
    for c in clients:
        c.serve()
    zero = "0" * 32
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda pair: pair[0].generate(pair[1], zero), zip(clients, lengths, strict=True))
        )
    assert results == [expected_tokens(PROMPT, n) for n in lengths]
    started = clients[0].start(uuid=zero)
    assert started.uuid == zero
    assert clients[1].status("1" * 32) == pb.GenerateInterrupted
    assert clients[1].end("StopRequest", zero) == (OK, zero), "its own, which it has released"
    assert clients[0].end("SyncRequest", "") == (OK, "")
    assert clients[0].get(zero).ids_from_generate == expected_tokens(PROMPT, 16)


async def test_a_killed_program_leaves_nothing_behind(
    client: Callable[..., DashClient], scripted_fleet: Fleet
) -> None:
    c = client()
    c.serve()
    uuids = [c.start(400).uuid for _ in range(5)]
    assert len(set(uuids)) == 5
    assert c.get(uuids[0]).ids_from_generate
    assert len(await owned_by_clients(scripted_fleet)) == 5
    code, out, _ = c.leave()
    assert (code, out) == (0, "")

    async def nothing_is_left() -> bool:
        return await owned_by_clients(scripted_fleet) == []

    await polled(nothing_is_left)
    assert not c.sockets[0].exists()
    other = client()
    other.serve()
    assert other.generate() == expected_tokens(PROMPT, 16), "the fleet and its model go on"


def test_the_models_of_the_fleet_are_not_the_programs_to_stop(client: Callable[..., DashClient]) -> None:
    first, second = client(), client()
    assert first.model("StartModel") == INVALID, "not built by this program"
    assert first.build() == OK
    assert first.start().as_status == INVALID, "not started"
    assert first.model("StartModel") == OK
    second.serve()
    left = first.start(64)
    assert first.model("StopModel") == RUNTIME, "there are unreleased results"
    assert first.status(left.uuid) == pb.GenerateFinished
    assert first.start().as_status == DENIED
    assert second.generate() == expected_tokens(PROMPT, 16)
    assert first.get(left.uuid).ids_from_generate == expected_tokens(PROMPT, 64)
    assert first.end("ReleaseRequest", left.uuid) == (OK, left.uuid)
    assert first.model("ReleaseModel") == OK
    assert first.start().as_status == PARAM
    assert second.generate() == expected_tokens(PROMPT, 16)


def test_refusals_come_with_their_reason_on_standard_error(client: Callable[..., DashClient]) -> None:
    c = client()
    assert c.build("another-name") == PARAM
    assert c.build(engine_max_length=2) == PARAM
    assert c.build(engine_max_length=32) == OK
    assert c.model("StartModel") == OK
    assert c.start(30).as_status == LIMIT, "the limit with which this program built its model"
    assert c.start(8, top_p=2.0).as_status == PARAM, "the fleet's own check"
    assert c.end("StopRequest", "never-seen") == (ILLEGAL_ID, "never-seen")
    assert (c.get("never-seen").empty, c.status("never-seen")) == (1, pb.GenerateInterrupted)
    assert c.generate(8) == expected_tokens(PROMPT, 8)
    _, _, err = c.leave()
    for part in ("--model another-name=MODEL", "engine_max_length is 2", "engine_max_length 32", "top_p"):
        assert part in err


def test_a_read_that_waits_ends_with_its_request(client: Callable[..., DashClient]) -> None:
    c = client()
    c.serve()
    ahead = [c.start(500).uuid for _ in range(20)]  # more than the fleet runs at once
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(c.get, ahead[-1])
        assert c.end("ReleaseRequest", ahead[-1]) == (OK, ahead[-1])
        waiting.result(START_TIMEOUT_S)
    assert c.end("ReleaseRequest", ahead[-1]) == (OK, ahead[-1]), "again"
    assert c.get(ahead[-1]).empty == 1


def test_a_model_that_the_fleet_does_not_have_is_built_where_a_path_is_given(
    scripted_fleet: Fleet, tmp_path: Path
) -> None:
    path = str(scripted_fleet.options.model_roots[0] / "m.json")
    models = {"their-name": Target("shim-built", path), "nowhere": Target("shim-nowhere")}
    directory = write_directory(tmp_path, ShimSettings(tuple(scripted_fleet.addresses[:1]), models)).parent
    c = DashClient(directory)
    try:
        assert c.build("nowhere") == PARAM
        c.serve()
        assert c.generate() == expected_tokens(PROMPT, 16)
        _, _, err = c.leave()
        assert "shim-nowhere" in err
    finally:
        c.close()


def test_further_ranks_follow(client: Callable[..., DashClient]) -> None:
    c = client(ranks=2)
    c.serve()
    assert c.call("GetRankNums", pb.Empty(), pb.RankId).rank_id == 2
    assert c.call("GetRankId", pb.Empty(), pb.RankId, rank=1).rank_id == 1
    for rank in (0, 1):  # what changes something goes to every rank
        message = request("0" * 32, PROMPT, 8, "their-name")
        answer = c.call("StartRequest", message, pb.StartRequestResponse, rank=rank)
        assert (answer.as_status, answer.uuid) == (OK, "0" * 32)
    assert c.call("StopModel", pb.ModelName(), pb.AsStatus, rank=1).as_status == OK
    assert c.get("0" * 32).ids_from_generate


def identity(path: Path) -> tuple[int, int] | None:
    """Of the file that is there now: the number of an inode may be used again at once."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def test_a_second_engine_in_the_same_program_takes_over(client: Callable[..., DashClient]) -> None:
    """ClientEngine made twice starts mpirun twice, for the same sockets."""
    c = client()
    c.serve()
    again = subprocess.Popen(c.shim.args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # type: ignore[arg-type]
    try:
        first = identity(c.sockets[0])
        deadline = time.monotonic() + START_TIMEOUT_S
        while identity(c.sockets[0]) in (None, first):
            assert time.monotonic() < deadline and again.poll() is None
            time.sleep(0.02)  # polling for another process
        c.channels[0].close()
        c.channels[0] = grpc.insecure_channel(f"unix:{c.sockets[0]}", [("grpc.use_local_subchannel_pool", 1)])
        assert c.call("GetRankNums", pb.Empty(), pb.RankId).rank_id == 0, "a new session"
        c.serve()
        assert c.generate() == expected_tokens(PROMPT, 16)
        c.leave()
        assert again.wait(START_TIMEOUT_S) == 0, "both went with the program"
    finally:
        again.kill()
        again.wait()
