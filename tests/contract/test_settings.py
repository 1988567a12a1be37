"""Flags, environment and file describe the same settings, and nothing unknown passes."""

from pathlib import Path
from typing import Any

import pytest
from allspark.cli.settings import AccessSettings, all_settings
from allspark_broker.settings import BrokerSettings
from allspark_bus.settings import CONFIG_TABLES, ConfigError, Settings, build_parser, check_environment
from allspark_gateway.settings import GatewaySettings
from allspark_workers.settings import WorkerSettings
from pydantic import ValidationError

PROCESSES = (GatewaySettings, BrokerSettings, WorkerSettings)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("ALLSPARK_")]:
        monkeypatch.delenv(name)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flag_wins_over_environment_wins_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "fleet.toml", "[broker]\nmax-queue = 1\nheartbeat-s = 0.1\nresult_ttl_s = 7\n")
    monkeypatch.setenv("ALLSPARK_MAX_QUEUE", "2")
    monkeypatch.setenv("ALLSPARK_HEARTBEAT_S", "0.2")

    settings = BrokerSettings.load(["--config", file, "--max-queue", "3"])

    assert (settings.max_queue, settings.heartbeat_s, settings.result_ttl_s) == (3, 0.2, 7.0)


def test_file_may_be_named_by_the_environment_and_hold_tables_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "fleet.toml", "[worker]\nname = 'left'\n[gateway]\nmax-calls = 5\n")
    monkeypatch.setenv("ALLSPARK_CONFIG", file)

    assert WorkerSettings.load([]).name == "left"
    assert GatewaySettings.load([]).max_calls == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[brokr]\n", r"unknown table \[brokr\]; did you mean broker\?"),
        ("[broker]\nmax-queu = 1\n", r"unknown key max-queu in \[broker\]; did you mean max-queue\?"),
        ("[broker]\nmax-queue = 'many'\n", r"max-queue in \[broker\]: Input should be a valid integer"),
        ("[broker]\nmax-queue = 1\nmax_queue = 2\n", "has a key twice"),
        ("broker = 1\n", r"\[broker\] must be a table"),
        ("[broker\n", "is not a TOML file"),
    ],
)
def test_bad_file_is_an_error_that_names_the_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BrokerSettings.load(["--config", write(tmp_path / "fleet.toml", text)])


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        BrokerSettings.load(["--config", str(tmp_path / "none.toml")])


@pytest.mark.parametrize(
    ("settings", "argv", "said"),
    [
        (GatewaySettings, ["--grcp", "x"], "unrecognized arguments: --grcp"),
        (GatewaySettings, ["--max-call", "3"], "unrecognized arguments"),  # no abbreviations
        (GatewaySettings, ["--call-timeout-s", "0"], "--call-timeout-s: Input should be greater than 0"),
        (GatewaySettings, ["--call-timeout-s", "inf"], "--call-timeout-s"),
        (GatewaySettings, ["--grpc", "50051"], "is not HOST:PORT"),
        (GatewaySettings, ["--grpc", "::1:50051"], "in brackets"),
        (GatewaySettings, ["--grpc", "unix:relative"], "absolute"),
        (GatewaySettings, ["--broker", "127.0.0.1:5550"], "tcp://HOST:PORT"),
        (GatewaySettings, ["--redis", "127.0.0.1"], "not a redis://"),
        (GatewaySettings, ["--tls-cert", "a.pem"], "--tls-cert and --tls-key belong together"),
        (GatewaySettings, ["--tls-client-ca", "a.pem"], "--tls-client-ca needs --tls-cert"),
        (GatewaySettings, ["--tokens", "t", "--grpc", "unix:/a"], "--grpc has none"),
        (GatewaySettings, ["--allow-shutdown", "127.0.0.1:1"], "not among --grpc"),
        (BrokerSettings, ["--heartbeat-s", "2", "--worker-timeout-s", "3"], "at least three times"),
        (BrokerSettings, ["--model-root", "models"], "absolute path"),
        (WorkerSettings, ["--device", "tpu"], "neither cpu nor cuda:INDEX"),
        (WorkerSettings, ["--dtype", "int3"], "invalid choice"),
        (WorkerSettings, ["--kv-memory", "much"], "--kv-memory"),
    ],
)
def test_bad_value_is_an_error_that_names_the_flag(
    settings: type[Settings], argv: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settings.load(argv)


def test_bad_environment_value_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSPARK_MAX_QUEUE", "-1")
    with pytest.raises(ConfigError, match="ALLSPARK_MAX_QUEUE: Input should be greater than or equal to 1"):
        BrokerSettings.load([])


def test_unknown_environment_variable_is_an_error() -> None:
    check_environment(all_settings(), {"ALLSPARK_GRPC": "x", "ALLSPARK_CONFIG": "y", "HOME": "/"})
    with pytest.raises(
        ConfigError, match=r"unknown environment variable ALLSPARK_GRCP; did you mean ALLSPARK_GRPC"
    ):
        check_environment(all_settings(), {"ALLSPARK_GRCP": "x"})


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:50051", "fleet.example:50051"])
def test_listening_where_others_can_reach_it_needs_a_word(address: str) -> None:
    with pytest.raises(ConfigError, match="--allow-remote"):
        GatewaySettings.load(["--grpc", address])
    assert GatewaySettings.load(["--grpc", address, "--allow-remote"]).grpc == (address,)


def test_tls_and_tokens_together_are_enough_to_listen_for_others() -> None:
    encrypted, known = ["--tls-cert=a", "--tls-key=b", "--tls-client-ca=c"], ["--tokens=t"]
    for part in (encrypted, known):
        with pytest.raises(ConfigError, match="--allow-remote"):
            GatewaySettings.load(["--grpc=0.0.0.0:1", *part])
    assert GatewaySettings.load(["--grpc=0.0.0.0:1", *encrypted, *known]).is_secured()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:1", "[::1]:50051", "unix:/run/as.sock"])
def test_local_addresses_are_fine(address: str) -> None:
    assert GatewaySettings.load([f"--grpc={address}"]).grpc == (address,)


def test_lists_repeat_as_flags_and_take_commas_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSPARK_BROKER", "tcp://a:1, tcp://b:2")
    assert WorkerSettings.load([]).broker == ("tcp://a:1", "tcp://b:2")
    assert WorkerSettings.load(["--broker=tcp://c:3", "--broker=tcp://d:4"]).broker == (
        "tcp://c:3",
        "tcp://d:4",
    )


def test_sizes_have_units() -> None:
    settings = WorkerSettings.load(["--kv-memory", "2GiB"])
    assert settings.kv_memory == 2 << 30
    assert "--kv-memory=2147483648" in settings.to_argv()


@pytest.mark.parametrize("settings", PROCESSES)
def test_to_argv_describes_the_same_settings(settings: type[Settings]) -> None:
    changed: dict[type[Settings], dict[str, Any]] = {
        GatewaySettings: {"grpc": ("127.0.0.1:1", "unix:/a"), "max_message_bytes": 12345, "ready_fd": 7},
        BrokerSettings: {"model_root": (Path("/models"), Path("/more, models")), "allow_remote": True},
        WorkerSettings: {"device": "cuda:1", "profile": True, "kv_memory": 5, "name": "a b"},
    }
    before = settings(**changed[settings])
    assert settings.load(before.to_argv()) == before


@pytest.mark.parametrize("settings", all_settings())
def test_help_is_enough(settings: type[Settings]) -> None:
    text = " ".join(build_parser(settings).format_help().split())
    assert settings.command in CONFIG_TABLES
    own = settings.model_fields.keys() - AccessSettings.model_fields.keys()  # the same four of every client
    assert len(own - {"ready_fd"}) <= 25  # that one is for the launcher
    for name, field in settings.model_fields.items():
        assert field.description, f"{settings.__name__}.{name} has no help"
        assert f"ALLSPARK_{name.upper()}" in text
    assert (settings.__doc__ or "").split(".")[0].split()[0] in text


def test_settings_are_frozen_and_closed() -> None:
    settings = BrokerSettings()
    with pytest.raises(ValidationError):
        settings.max_queue = 5  # type: ignore[misc]
    with pytest.raises(ValidationError):
        BrokerSettings(max_queu=5)  # type: ignore[call-arg]
