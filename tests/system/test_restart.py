"""A whole fleet is stopped and started again on the same data: nothing that was promised is lost."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
        start_timeout_s=300.0,
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


@dataclass(frozen=True)
class Launched:
    """A fleet whose launcher is a process too."""

    process: subprocess.Popen[bytes]
    addresses: list[str]
    pids: list[int]

    def kill_everything(self) -> None:
        """SIGKILL for every process; the launcher sleeps meanwhile, so that it starts nothing again."""
        self.process.send_signal(signal.SIGSTOP)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@contextmanager
def launched(directory: Path) -> Iterator[Launched]:
    command = [sys.executable, str(Path(__file__).with_name("launched_fleet.py")), str(directory)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 300)[0], "the fleet did not start"
            yield Launched(process, **json.loads(process.stdout.readline()))
        finally:
            process.communicate()  # closes its standard input, at which it ends


def test_unfinished_requests_continue_after_every_process_was_killed_at_once(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"max_length": 1000, "max_batch": 4, "step_s": 0.01}')
    prompts = {f"u{i}": [i + 1, 5] for i in range(12)}  # some wait for a place
    received: dict[str, list[int]] = {}
    with launched(tmp_path) as fleet:
        with Client(fleet.addresses) as client:
            requests = {
                uuid: client.submit("m", prompt, GenerateOptions(max_new_tokens=300), uuid)
                for uuid, prompt in prompts.items()
            }
            for uuid in list(prompts)[:3]:
                received[uuid] = list(next(requests[uuid].stream()))
            fleet.kill_everything()
        assert all(received.values())

    with launched(tmp_path) as fleet, Client(fleet.addresses) as client:
        for uuid, prompt in prompts.items():
            head = received.get(uuid, [])
            request = client.attach("m", uuid, received=len(head))
            assert head + request.result(120) == expected_tokens(prompt, 300), uuid
            assert request.finish_reason == "length"
            request.release()
        assert client.stat("m").running_request == 0, "it ends before its end is told"
