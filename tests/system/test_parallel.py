"""A model over two devices in a whole fleet: it answers, and survives the death of one of its ranks."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from allspark.client import AllSparkError, Client, GenerateOptions, ModelOptions
from allspark.launcher import Fleet, FleetOptions

from tests.engine.engine_helpers import TinyModels, random_prompt
from tests.system.conftest import report
from tests.system.test_greedy import assert_greedy

NEW = 64
PARALLEL = ModelOptions(compute_unit="CPU:0,1", matmul_precision="highest", max_length=256, max_batch=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def fleet(tiny: TinyModels) -> Iterator[Fleet]:
    with Fleet(
        FleetOptions(start_timeout_s=300.0, workers=1, model_roots=(tiny.path("llama-llama3"),)), report
    ) as fleet:
        fleet.load_model("m", tiny.path("llama-llama3"), PARALLEL)
        yield fleet


def ranks_of(pid: int) -> list[int]:
    """Processes of the other ranks: children of any of the worker's threads."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for path in lists for child in path.read_text().split()]
    return [int(c) for c in children if "parallel.follower" in Path(f"/proc/{c}/cmdline").read_text()]


def test_a_rank_that_dies_takes_its_worker_along_and_the_stream_goes_on(
    fleet: Fleet, tiny: TinyModels
) -> None:
    """The group is down at once; the worker comes back with both ranks and continues at the next position."""
    reference, prompt = tiny.reference("llama-llama3"), random_prompt(33, seed=1)
    with Client(fleet.addresses) as client:
        with client.submit("m", prompt, GenerateOptions(max_new_tokens=NEW)) as request:
            stream = request.stream()
            got = list(next(stream))
            worker = fleet.workers[0].pid
            assert worker is not None
            (rank,) = ranks_of(worker)
            os.kill(rank, signal.SIGKILL)
            for ids in stream:
                got += ids
        assert_greedy(reference, prompt, got)
        limit_s = time.monotonic() + 300
        while fleet.workers[0].pid in (worker, None):  # it leaves with its rank
            assert time.monotonic() < limit_s
            time.sleep(0.02)  # polling for another process


def test_a_model_that_cannot_be_divided_is_refused_with_the_reason(fleet: Fleet, tiny: TinyModels) -> None:
    three = ModelOptions(compute_unit="CPU:0,1,2", max_length=64)
    with pytest.raises(AllSparkError, match="3 devices"):
        fleet.load_model("three", tiny.path("llama-llama3"), three)
