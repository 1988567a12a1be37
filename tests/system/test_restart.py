"""A whole fleet is stopped and started again on the same data: nothing that was promised is lost."""

import sys
from pathlib import Path

import pytest
from allspark.client import Client, GenerateOptions, ModelOptions
from allspark.launcher import Fleet, FleetOptions

from tests.fleet.scripted_engine import expected_tokens
from tests.system.conftest import SCRIPTED, report

PROMPT = [7, 8, 9]
NUM_TOKENS = 40


@pytest.fixture
def options(tmp_path: Path) -> FleetOptions:
    (tmp_path / "m.json").write_text('{"max_length": 512, "max_batch": 4}')
    return FleetOptions(
        data_dir=tmp_path / "data",
        model_roots=(tmp_path,),
        worker_command=(sys.executable, SCRIPTED),
        drain_s=5.0,
    )


def model_file(options: FleetOptions) -> Path:
    return options.model_roots[0] / "m.json"


def test_results_and_models_outlive_the_fleet(options: FleetOptions) -> None:
    expected = expected_tokens(PROMPT, NUM_TOKENS)
    with Fleet(options, report) as fleet:
        fleet.load_model("m", model_file(options))
        with Client(fleet.addresses) as client:
            request = client.submit("m", PROMPT, GenerateOptions(max_new_tokens=NUM_TOKENS), "kept")
            client.sync("kept")
            assert request.result() == expected

    with Fleet(options, report) as fleet, Client(fleet.addresses) as client:
        assert client.attach("m", "kept").result() == expected
        # Nobody built the model again: the catalogue did.
        again = client.submit("m", PROMPT, GenerateOptions(max_new_tokens=NUM_TOKENS))
        assert again.result() == expected


def test_model_that_the_store_remembers_gets_new_settings(options: FleetOptions) -> None:
    with Fleet(options, report) as fleet:
        fleet.load_model("m", model_file(options), ModelOptions(max_length=100))
        with Client(fleet.addresses) as client:
            client.submit("m", PROMPT, GenerateOptions(max_new_tokens=4), "unreleased").result()

    with Fleet(options, report) as fleet:
        fleet.load_model("m", model_file(options), ModelOptions(max_length=200))
        with Client(fleet.addresses) as client:
            longer = client.submit("m", PROMPT, GenerateOptions(max_length=150)).result()
            assert len(longer) == 150 - len(PROMPT)
            assert len(client.attach("m", "unreleased").result()) == 4
