"""Certificates and token of a client: files that cannot be used are refused, secrets stay out of sight."""

from pathlib import Path

import pytest
from allspark.certs import CertsError, write_set
from allspark.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from allspark.client import Access, AsyncClient, Client
from cryptography import x509


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "set"
    write_set(directory, hosts=["fleet.example", "10.0.0.7"], tenants=("a",), days=3)
    return directory


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "address", ["10.0.0.5:50051", "fleet.example:1", "[fe80::1]:1", "0.0.0.0:1", "localhost.x:1"]
)
def test_a_token_never_travels_unencrypted_to_another_machine(kind: type[Client], address: str) -> None:
    with pytest.raises(ValueError, match="a token is not sent to"):
        kind(["127.0.0.1:1", address], access=Access(token="t.secret"))


async def test_a_token_may_stay_on_this_machine_without_tls() -> None:
    Access(token="t.secret").check(["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/a.sock"])
    Access(token="t.secret", ca=b"pem").check(["10.0.0.5:50051"])


def test_secrets_are_in_no_repr(made: Path) -> None:
    access = Access.from_files(
        ca=made / "ca.pem", certificate=made / "client.pem", key=made / "client.key", token=made / "a.token"
    )
    assert repr(access) == "Access()"
    assert access.metadata() == (("authorization", f"Bearer {(made / 'a.token').read_text()}"),)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--token-file={made}/none"], "none: No such file"),
        (["--tls-ca={made}/a.token"], "a.token is not a PEM file"),
        (["--tls-cert={made}/client.pem"], "belong together"),
        (["--tls-cert={made}/client.pem", "--tls-key={made}/client.key"], "needs TLS"),
        (["--token-file={made}/tokens.toml"], "a token is one word"),
        (["--token-file={made}/a.token", "--grpc=10.0.0.1:5"], "not sent to 10.0.0.1:5 without TLS"),
    ],
)
def test_a_command_says_which_file_cannot_be_used(
    flags: list[str], said: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "--model=m", *(flag.format(made=made) for flag in flags)]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert said in told
    assert (made / "a.token").read_text() not in told


def test_a_development_set_is_private_and_overwrites_nothing(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path / "set")]) == EXIT_OK
    written = [path for path in (tmp_path / "set").rglob("*") if path.is_file()]
    assert sorted(map(str, written)) == capsys.readouterr().out.split()
    for path in written:
        is_public = path.suffix == ".pem" or (path.suffix == ".key" and "curve" in path.parts)
        assert path.stat().st_mode & 0o777 == (0o644 if is_public else 0o600), path
        if is_public:
            assert b"secret-key" not in path.read_bytes()
    assert main(["certs", str(tmp_path / "set")]) == EXIT_FAILED
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(CertsError, match="not empty"):
        write_set(made)
    assert main(["certs", str(tmp_path / "next"), "--tenant=admin"]) == EXIT_USAGE
    assert main(["certs", str(tmp_path / "next"), "--tenant=a", "--tenant=a"]) == EXIT_USAGE
    assert not (tmp_path / "next").exists()


def test_certificates_name_their_hosts_and_can_sign_nothing(made: Path) -> None:
    server = x509.load_pem_x509_certificate((made / "gateway.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fleet.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1", "10.0.0.7"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (server.not_valid_after_utc - server.not_valid_before_utc).days == 3
