"""The DashInfer shim's parts: command line, directory, translation between the generations."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from allspark.certs import write_set
from allspark.cli import EXIT_FAILED, EXIT_OK, main
from allspark.client import AccessDenied, AsyncClient
from allspark.client.access import Access
from allspark.shim import ShimError, ShimSettings, translate, write_directory
from allspark.shim.arguments import Launch, parse
from allspark.shim.session import Refused, Session
from allspark.shim.settings import Target, parse_models
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import dashinfer_v1_pb2 as v1

RANK_0 = "-n 1 numactl -m 0 -N 0 /d/allspark_daemon 4711 0"
RANK_1 = "-n 1 numactl -m 1 -N 1 /d/allspark_daemon 4711 1"
FLAGS = "-mca plm_rsh_agent false --allow-run-as-root"


def test_command_line_of_dashinfers_client() -> None:
    assert parse(f"{FLAGS} {RANK_0}".split()) == Launch(4711, (0,))
    both = parse(f"{FLAGS} {RANK_0} : {RANK_1}".split())
    assert both == Launch(4711, (0, 1))
    assert both.sockets()[1] == "/tmp/allspark.pid_4711_rank_1"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--version",
        f"{FLAGS} -n 1 numactl /d/allspark_daemon",
        f"{FLAGS} -n 1 /d/allspark_daemon 4711 x",
        f"{FLAGS} -n 1 /d/allspark_daemon 0 0",
        f"{FLAGS} {RANK_1}",
        f"{FLAGS} {RANK_0} : {RANK_0}",
        f"{FLAGS} {RANK_0} : {RANK_1.replace('4711', '4712')}",
    ],
)
def test_other_command_lines_are_refused(line: str) -> None:
    with pytest.raises(ShimError, match="AS_DAEMON_PATH"):
        parse(line.split())


def test_names_of_models() -> None:
    models = parse_models(["a=x", "b=y@/models/y", "*=z"])
    settings = ShimSettings(("h:1",), models)
    assert settings.target("a") == Target("x")
    assert settings.target("b") == Target("y", "/models/y")
    assert settings.target("anything") == Target("z")
    assert ShimSettings(("h:1",)).target("same") == Target("same")
    assert ShimSettings(("h:1",), {"a": Target("x")}).target("b") is None


@pytest.mark.parametrize("text", ["a", "=x", "a=", "a=@/p"])
def test_names_of_models_that_mean_nothing(text: str) -> None:
    with pytest.raises(ShimError, match="NAME=MODEL"):
        parse_models([text])
    with pytest.raises(ShimError, match="two meanings"):
        parse_models(["a=x", "a=y"])


#: Field numbers and wire types of the first generation, written by hand: varints at tags 15, 16, 17.
V1_BYTES = (
    b"\x0a\x01m" b"\x12\x09m.dimodel" b"\x1a\x0bm.ditensors" b"\x22\x05CPU:0" b"\x2a\x06medium"
    b"\x40\x80\x04" b"\x48\x10" b"\x78\x0a" b"\x80\x01\x01" b"\x88\x01\x06"
)  # fmt: skip


def test_configuration_of_the_first_generation_is_not_misread() -> None:
    old = v1.ModelStructConfig.FromString(V1_BYTES)
    assert (old.prefill_mode, old.text_graph, old.num_threads) == (10, True, 6)
    assert (old.engine_max_length, old.engine_max_batch) == (512, 16)
    misread = pb.ModelStructConfig.FromString(V1_BYTES)
    assert (misread.enable_prefix_cache, misread.prefix_cache_ttl, misread.prefill_mode) == (True, 1, 6)
    new = translate.model_config(old, "fleet-model", "/models/m")
    assert new == pb.ModelStructConfig(
        model_name="fleet-model", model_path="/models/m", matmul_precision="medium", engine_max_length=512,
        engine_max_batch=16, swap_threshold=-1, enable_prefix_cache=True, prefix_cache_ttl=300,
    )  # fmt: skip


def test_no_tokens_are_null_in_the_first_generation() -> None:
    assert (translate.elements([]).empty, translate.elements([7]).empty) == (1, 0)
    assert translate.elements([7]).HasField("tensors_from_model_inference")


def test_directory_holds_a_launcher_and_what_it_needs(tmp_path: Path) -> None:
    settings = ShimSettings(("h:1", "unix:/x"), {"a": Target("x", "/p")})
    launcher = write_directory(tmp_path / "a dir's name", settings)
    assert os.access(launcher, os.X_OK)
    assert ShimSettings.read(launcher.parent) == settings
    write_directory(launcher.parent, ShimSettings(("h:2",)))
    assert ShimSettings.read(launcher.parent).grpc == ("h:2",), "written again"
    run = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stdout == "" and "AS_DAEMON_PATH" in run.stderr


def test_a_real_mpirun_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_bytes(b"\x7fELF\xff")
    with pytest.raises(ShimError, match="not ours"):
        write_directory(tmp_path, ShimSettings(("h:1",)))
    assert (tmp_path / "mpirun").read_bytes() == b"\x7fELF\xff"


def test_the_command_writes_it_and_says_what_to_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "shim"
    assert main(["dashinfer-shim", str(directory), "--grpc=h:1", "--model=a=x", "--model=*=y@/p"]) == EXIT_OK
    assert f"AS_DAEMON_PATH={directory}" in capsys.readouterr().out
    models = {"a": Target("x"), "*": Target("y", "/p")}
    assert ShimSettings.read(directory) == ShimSettings(("h:1",), models)
    assert main(["dashinfer-shim", str(directory), "--model=a"]) == EXIT_FAILED
    assert "NAME=MODEL" in capsys.readouterr().err


def test_a_shim_keeps_where_certificates_and_token_are_and_not_the_token(tmp_path: Path) -> None:
    write_set(tmp_path / "set", tenants=("a",))
    ca, token = tmp_path / "set" / "ca.pem", tmp_path / "set" / "a.token"
    directory = tmp_path / "shim"
    flags = ["--grpc=h:1", f"--tls-ca={ca}", f"--token-file={token}"]
    assert main(["dashinfer-shim", str(directory), *flags]) == EXIT_OK
    assert ShimSettings.read(directory).access() == Access(ca=ca.read_bytes(), token=token.read_text())
    assert token.read_text() not in (directory / "shim.json").read_text()
    token.unlink()
    with pytest.raises(ShimError, match="cannot be used"):
        ShimSettings.read(directory).access()


@pytest.mark.parametrize("text", ["", "{}", '{"grpc": ["a"], "models": {"m": {"x": 1}}}'])
def test_damaged_settings_say_how_to_mend_them(tmp_path: Path, text: str) -> None:
    (tmp_path / "shim.json").write_text(text)
    with pytest.raises(ShimError, match="allspark dashinfer-shim"):
        ShimSettings.read(tmp_path)


class InferOnly:
    """A fleet as a token without the scope admin sees it; model "runs" serves, "built" does not."""

    async def call(self, name: str, message: Any, **_: Any) -> tuple[Any, dict[str, str]]:
        if name == "StartModel":
            raise AccessDenied("StartModel: the token lacks the scope admin")
        if name == "GetModelInformation":
            return pb.ModelInfo(model_info="Model Type : x\n"), {}
        assert name == "GetAsEngineStat"
        return pb.AsEngineStat(total_span=8 if message.model_name == "runs" else 0), {}


async def test_a_token_that_may_not_start_models_is_enough_for_one_that_runs() -> None:
    session = Session(cast(AsyncClient, InferOnly()), ShimSettings(("h:1",)), 1)
    for name in ("runs", "built"):
        assert (await session.build(v1.ModelStructConfig(model_name=name))).as_status == 0
    assert (await session.start_model(pb.ModelName(model_name="runs"))).as_status == 0
    with pytest.raises(Refused, match="lacks the scope admin"):
        await session.start_model(pb.ModelName(model_name="built"))


def test_start_up_imports_little() -> None:
    """It has eight seconds to listen, on a machine that may be busy with anything."""
    program = "import sys, json, allspark.shim.main; json.dump(sorted(sys.modules), sys.stdout)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(run.stdout)}
    assert loaded & {"torch", "numpy", "transformers", "pydantic", "rich", "zmq", "redis", "msgpack"} == set()
