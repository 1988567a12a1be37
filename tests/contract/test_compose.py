"""docker-compose.yml: valid compose, every command line parses, and the parts fit together."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from allspark.cli import COMMANDS
from allspark.cli.settings import StatusSettings, all_settings
from allspark_bus.setting_types import split_host_port
from allspark_bus.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SETTINGS = {settings.command: settings for settings in all_settings()}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("ALLSPARK_")]:
        monkeypatch.delenv(name)


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return loaded


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def ours() -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services().items() if "build" in service}


def settings_of(service: dict[str, Any]) -> Any:
    command, *flags = service["command"]
    return SETTINGS[command].load(flags)


def test_file_is_valid_compose() -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    command = [str(tool), "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_schema_check_can_fail(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(
        FILE.read_text(encoding="utf-8").replace("healthcheck:", "healthchek:"), encoding="utf-8"
    )
    tool = Path(sys.executable).with_name("check-jsonschema")
    command = [str(tool), "--builtin-schema", "vendor.compose-spec", str(broken)]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 1


def test_there_is_a_whole_fleet_and_no_version_key() -> None:
    assert "version" not in compose()
    kinds = [service["command"][0] for service in ours().values()]
    assert sorted(kinds) == ["broker", "gateway", "gateway", "load", "worker"]
    assert "valkey" in services()
    # `--scale worker=4` works only for a service without a fixed name or host port.
    assert not {"container_name", "ports"} & set(services()["worker"])


@pytest.mark.parametrize("name", sorted(ours()))
def test_command_line_parses(name: str) -> None:
    service = ours()[name]
    assert service["command"][0] in COMMANDS
    assert isinstance(settings_of(service), Settings)


@pytest.mark.parametrize("name", sorted(set(services()) - {"load"}))
def test_every_service_has_a_health_check(name: str) -> None:
    kind, *words = services()[name]["healthcheck"]["test"]
    if name == "valkey":
        assert words == ["valkey-cli", "ping"]
        return
    command = shlex.split(words[0].replace("$$HOSTNAME", "0123456789ab")) if kind == "CMD-SHELL" else words
    assert command[:2] == ["allspark", "status"]
    checked = StatusSettings.load(command[2:])
    assert checked.grpc or checked.broker
    if name == "worker":
        assert checked.expect_worker == "0123456789ab"


def host_and_port(address: str) -> tuple[str, int]:
    return split_host_port(re.sub(r"^(tcp|redis)://", "", address).partition("/")[0])


def test_addresses_meet() -> None:
    """What one service connects to, another one listens on."""
    broker = settings_of(services()["broker"])
    frontend, backend = host_and_port(broker.frontend)[1], host_and_port(broker.backend)[1]
    for name, service in ours().items():
        settings = settings_of(service)
        if service["command"][0] == "load":
            for address in settings.grpc:
                host, port = host_and_port(address)
                assert port == host_and_port(settings_of(services()[host]).grpc[0])[1]
            continue
        assert host_and_port(settings.redis) == ("valkey", 6379)
        assert "valkey" in service["depends_on"], name
        for endpoint in getattr(settings, "broker", ()):
            wanted = backend if service["command"][0] == "worker" else frontend
            assert host_and_port(endpoint) == ("broker", wanted), name


def test_models_are_mounted_where_the_model_root_is() -> None:
    for name in ("broker", "worker"):
        mount = services()[name]["volumes"][0]
        assert [str(root) for root in settings_of(services()[name]).model_root] == [mount.split(":")[-2]]
        assert mount.endswith(":ro")


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for service in services().values() for port in service.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_containers_get_longer_to_stop_than_their_processes_take_to_drain() -> None:
    for name in ("worker", "gateway-1", "gateway-2"):
        service = services()[name]
        assert float(service["stop_grace_period"].removesuffix("s")) > settings_of(service).drain_s


def test_images_are_built_from_targets_that_exist() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    for service in ours().values():
        assert ROOT / service["build"]["dockerfile"] == DOCKERFILE
        assert service["build"]["target"] in targets


def test_dockerfile_copies_what_exists() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
