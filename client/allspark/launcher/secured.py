"""A fleet on one machine with everything secured by a set of ``allspark certs``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from allspark_bus.curve import ClientKeys

from allspark.client import Access
from allspark.launcher.errors import LaunchError

#: Files that must be there, so that a wrong directory is named as such before anything starts.
NEEDED = ("ca.pem", "gateway.pem", "gateway.key", "tokens.toml", "admin.token", "store.acl", "store.password")


@dataclass(frozen=True, slots=True)
class Secured:
    """The set in ``directory``, and what each process and client takes from it. Raises ``LaunchError``."""

    directory: Path

    def __post_init__(self) -> None:
        missing = [name for name in NEEDED if not (self.directory / name).is_file()]
        if missing:
            raise LaunchError(
                f"{self.directory} lacks {', '.join(missing)}: make a whole set with allspark certs"
            )

    def flags(self, kind: str) -> list[str]:
        """Further flags of a broker, gateway or worker: names of files only."""
        return [f"--curve={self.directory / 'curve' / kind}"]

    def listener_flags(self, addresses: Sequence[str]) -> list[str]:
        """Further flags of a gateway at these addresses."""
        if all(address.startswith("unix:") for address in addresses):
            return []
        files = {"tls-cert": "gateway.pem", "tls-key": "gateway.key", "tokens": "tokens.toml"}
        return [f"--{flag}={self.directory / name}" for flag, name in files.items()]

    def store_options(self) -> dict[str, str]:
        """Further options of the embedded store."""
        return {"aclfile": str(self.directory / "store.acl")}

    def store_url(self, socket: Path) -> str:
        """The embedded store at its socket, as the fleet's user."""
        return f"unix://allspark@{socket}?password_file={quote(str(self.directory / 'store.password'))}"

    def access(self) -> Access:
        """Of the operator, for the gateways."""
        return Access.from_files(ca=self.directory / "ca.pem", token=self.directory / "admin.token")

    def keys(self) -> ClientKeys:
        """Of the operator, for the brokers."""
        return ClientKeys.read(self.directory / "curve" / "gateway")

    def client_flags(self) -> list[str]:
        """What an ``allspark`` command of the operator adds."""
        return [f"--tls-ca={self.directory / 'ca.pem'}", f"--token-file={self.directory / 'admin.token'}"]
