"""What a worker process holds in physical memory while models come, are unloaded, and go."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from allspark.client import Client, GenerateOptions, ModelOptions
from allspark.launcher import Fleet, FleetOptions
from allspark_proto import allspark_service_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from medium_model import resident_bytes, write_medium_model

from tests.system.conftest import report

MIB = 1 << 20
WEIGHTS = 65 * MIB  # of the medium model, and a little less
OPTIONS = ModelOptions(swap_threshold=0, max_length=128, max_batch=2)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("medium-models")
    write_medium_model(root / "medium")
    with Fleet(FleetOptions(start_timeout_s=300.0, workers=1, model_roots=(root,)), report) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(fleet.addresses) as client:
        yield client


class Worker:
    """The one worker and its model files."""

    def __init__(self, fleet: Fleet, client: Client) -> None:
        self.pid = fleet.workers[0].pid
        self.path = str(fleet.options.model_roots[0] / "medium")
        self.client = client

    def held(self) -> int:
        return resident_bytes(self.pid)

    def up(self, name: str) -> None:
        self.client.build_model(name, self.path, OPTIONS)
        self.client.start_model(name)

    def generate(self, name: str) -> list[int]:
        with self.client.submit(name, [5, 6, 7], GenerateOptions(max_new_tokens=8)) as request:
            return request.result()

    def model_call(self, rpc: str, name: str) -> None:
        reply, trailing = self.client.call(rpc, pb.ModelName(model_name=name), timeout_s=300.0)
        assert reply.as_status == 0, trailing


@pytest.mark.slow
def test_release_returns_all_memory_however_often(fleet: Fleet, client: Client) -> None:
    worker = Worker(fleet, client)
    worker.up("first")  # what is loaded once stays: libraries, threads, pools of the kernels
    tokens = worker.generate("first")
    with_model = worker.held()
    client.release_model("first")
    empty = worker.held()
    assert with_model - empty > WEIGHTS
    for cycle in range(4):
        worker.up(f"m{cycle}")
        assert worker.generate(f"m{cycle}") == tokens
        client.release_model(f"m{cycle}")
    assert worker.held() - empty < WEIGHTS // 8, "less than an eighth of one model after four more"


@pytest.mark.slow
def test_unload_frees_what_reload_brings_back_while_another_model_serves(
    fleet: Fleet, client: Client
) -> None:
    worker = Worker(fleet, client)
    worker.up("a")
    worker.up("b")
    tokens = worker.generate("a")
    both = worker.held()
    worker.model_call("UnloadModelFromDeviceMemory", "a")
    assert both - worker.held() > WEIGHTS
    assert worker.generate("b") == tokens
    worker.model_call("ReloadModelToDeviceMemory", "a")
    assert worker.generate("a") == tokens
    client.release_model("a")
    client.release_model("b")
    assert both - worker.held() > 2 * WEIGHTS
