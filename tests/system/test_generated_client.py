"""A client generated from the .proto alone, over TCP and over a unix socket."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from allspark.launcher import Fleet

from tests.fleet.scripted_engine import expected_tokens

PROTO = Path(__file__).parents[2] / "proto"


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={out}"]
    subprocess.run([*command, f"--grpc_python_out={out}", "allspark_service.proto"], check=True)
    return out


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_the_canonical_loop(scripted_fleet: Fleet, stubs: Path, transport: str) -> None:
    address = scripted_fleet.addresses[1 if transport == "unix" else 0]
    assert address.startswith("unix:") == (transport == "unix")
    model = scripted_fleet.options.model_roots[0] / "m.json"
    script = Path(__file__).with_name("canonical_client.py")
    run = subprocess.run(
        [sys.executable, script, stubs, address, model, "40", "11", "12", "13"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["tokens"] == expected_tokens([11, 12, 13], 40)
    assert result["status"] == 3
    assert result["ranks_before"] == 0, "the operator has loaded a model; this tenant has built none yet"
    assert re.fullmatch(r"\d+\.\d+\.\d+/\(GitSha1:[0-9a-f]{7,40}\)", result["version"])
