"""deploy/docker-compose.secure.yml over docker-compose.yml: all is secured, by files that a set has."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from allspark.certs import write_set
from allspark.cli.settings import StatusSettings
from allspark_bus import redis_url

from tests.contract.test_compose import FILE, ROOT, SETTINGS, host_and_port, services

OVERLAY = ROOT / "deploy" / "docker-compose.secure.yml"
PREFIX = "${SECURE_DIR:-./secure}/"


def overlay() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(OVERLAY.read_text(encoding="utf-8"))["services"]
    return found


def ours() -> list[str]:
    return sorted(set(overlay()) - {"valkey"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "secure"
    write_set(directory, hosts=("valkey", "gateway-1", "gateway-2"))
    return directory


def mounts(name: str) -> dict[str, str]:
    """Path in the container -> path in the set."""
    found = {}
    for volume in overlay()[name]["volumes"]:
        assert volume.startswith(PREFIX) and volume.endswith(":ro")
        source, target = volume.removeprefix(PREFIX).removesuffix(":ro").split(":")
        found[target] = source
    return found


def test_the_overlay_is_valid_compose() -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    command = [str(tool), "--builtin-schema", "vendor.compose-spec", str(OVERLAY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_secured_and_keeps_its_addresses() -> None:
    assert set(overlay()) == set(services())
    for name in ours():
        command, *flags = overlay()[name]["command"]
        base_command, *base_flags = services()[name]["command"]
        settings, base = SETTINGS[command].load(flags), SETTINGS[base_command].load(base_flags)
        assert command == base_command
        for field in ("grpc", "broker", "frontend", "backend", "model_root", "drain_s", "model", "device"):
            assert getattr(settings, field, None) == getattr(base, field, None), (name, field)
        if name == "load":
            assert settings.tls_ca and settings.token_file
            continue
        assert settings.curve is not None and not settings.allow_remote
        assert settings.is_secured() or not settings.listening_on()
        target = redis_url.parse(settings.redis)
        redis_url.check(settings.redis)
        assert "ssl_ca_certs" in target.arguments and "credential_provider" in target.arguments
        assert host_and_port(settings.redis.replace("rediss://allspark@", "redis://")) == ("valkey", 6379)


@pytest.mark.parametrize("name", ours())
def test_the_files_of_a_command_are_mounted_and_the_set_has_them(name: str, made: Path) -> None:
    words = [*overlay()[name]["command"], *overlay()[name].get("healthcheck", {}).get("test", ())]
    needed = set(re.findall(r"/secure/[\w./-]+", " ".join(words)))
    assert needed == set(mounts(name)), "no more and no less than is used"
    for source in mounts(name).values():
        assert (made / source).exists(), source
    assert overlay()[name]["user"].startswith("${FLEET_USER:?")


def test_nobody_gets_the_secrets_of_another() -> None:
    has = {name: set(mounts(name).values()) for name in overlay()}
    assert [name for name in has if "ca.key" in has[name]] == []
    assert [name for name in has if "admin.token" in has[name]] == ["load"]
    assert [name for name in has if "store.key" in has[name]] == ["valkey"]
    assert [name for name in has if "gateway.key" in has[name]] == ["gateway-1", "gateway-2"]
    assert [name for name in has if "curve/gateway" in has[name]] == ["gateway-1", "gateway-2"]
    assert [name for name in has if "curve/broker" in has[name]] == ["broker"]


@pytest.mark.parametrize("name", sorted(set(services()) - {"load", "valkey"}))
def test_health_checks_prove_themselves(name: str) -> None:
    kind, *words = overlay()[name]["healthcheck"]["test"]
    command = shlex.split(words[0].replace("$$HOSTNAME", "0123456789ab")) if kind == "CMD-SHELL" else words
    checked = StatusSettings.load(command[2:])
    assert checked.curve if checked.broker else (checked.tls_ca and checked.token_file)


def test_the_store_speaks_tls_only_and_knows_its_users(made: Path) -> None:
    service = overlay()["valkey"]
    shell, flag, script = service["command"]
    assert (shell, flag) == ("sh", "-c")
    copy, start = (shlex.split(part) for part in script.split("&&"))
    assert copy[:7] == ["install", "-o", "valkey", "-g", "valkey", "-m", "400"]
    *copied, target = copy[7:]
    assert [target] == service["tmpfs"]
    assert start[:3] == ["exec", "docker-entrypoint.sh", "valkey-server"]
    flags = dict(zip(start[3::2], start[4::2], strict=True))
    assert (flags["--port"], flags["--tls-port"]) == ("0", "6379")
    files = {value for value in flags.values() if value.startswith("/tls/")}
    assert files == {path.replace("/secure/", "/tls/") for path in copied}
    assert set(copied) | {"/secure/store.password"} == set(mounts("valkey"))
    assert "user default reset off" in (made / "store.acl").read_text()
    base = services()["valkey"]["command"][1:]
    for name, value in zip(base[::2], base[1::2], strict=True):
        assert flags[name] == value, "what a store needs is the same with TLS"


def test_the_commands_in_its_head_name_both_files() -> None:
    head = OVERLAY.read_text(encoding="utf-8").partition("\n\n")[0]
    hosts = re.findall(r"--host (\S+)", head)
    assert hosts == ["valkey", "gateway-1", "gateway-2"]
    for path in re.findall(r"-f (\S+)", head):
        assert (ROOT / path).is_file()
    assert FILE.name in head
