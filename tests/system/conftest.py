"""Whole fleets: gateways, broker, workers and Valkey as processes, asked through gRPC only."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from allspark import demo_model
from allspark.client import ModelOptions
from allspark.launcher import Fleet, FleetOptions

START_TIMEOUT_S = 300.0
SCRIPTED = str(Path(__file__).parents[1] / "fleet" / "scripted_engine.py")


def report(name: str, line: str) -> None:
    print(f"{name} | {line}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return demo_model.fetch()


@pytest.fixture(scope="module")
def real_fleet(smollm2: Path) -> Iterator[Fleet]:
    """SmolLM2 in bf16 on two workers behind two gateways; when nothing runs, no KV span is used."""
    options = FleetOptions(
        workers=2,
        gateways=2,
        model_roots=(smollm2.parent,),
        worker_args=("--dtype=bf16",),
        broker_args=("--worker-timeout-s=10",),  # on a busy machine both are slow at times
        start_timeout_s=START_TIMEOUT_S,
    )
    with Fleet(options, report) as fleet:
        shared_while_used = ModelOptions(max_length=512, max_batch=32, prefix_cache_ttl_s=0)
        fleet.load_model("smollm2", smollm2, shared_while_used)
        yield fleet


@pytest.fixture(scope="module")
def scripted_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The scripted engine behind one gateway with a TCP and a unix listener; model "m" runs."""
    root = tmp_path_factory.mktemp("models")
    (root / "m.json").write_text('{"max_length": 512, "max_batch": 16}')
    options = FleetOptions(
        workers=1,
        grpc=("127.0.0.1:0", f"unix:{root}/s.sock"),
        model_roots=(root,),
        worker_command=(sys.executable, SCRIPTED),
        broker_args=("--drain-s=60",),
        gateway_args=("--redelivery-s=60", "--status-deferral-s=60"),  # it may not be let run for a while
        start_timeout_s=START_TIMEOUT_S,
    )
    with Fleet(options, report) as fleet:
        fleet.load_model("m", root / "m.json")
        yield fleet
