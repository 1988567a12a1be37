"""Ports of servers that come back under the address they had."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from allspark.launcher import ports
from allspark.launcher.ports import free_port


def test_a_client_of_a_dead_server_cannot_connect_to_itself() -> None:
    """No outgoing connection is given a port of this range, so none can meet itself there."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(50)}
    assert all(0 < port < lowest for port in found)
    assert len(found) > 25, "two fleets that start at once seldom choose the same"


def test_a_port_in_use_is_not_chosen(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    with socket.create_server(("127.0.0.1", free_port())) as s:
        taken = s.getsockname()[1]
        first = [taken, taken]
        anything = ports._random.randrange
        monkeypatch.setattr(ports._random, "randrange", lambda *r: first.pop() if first else anything(*r))
        assert free_port() != taken
        assert not first


def test_a_port_is_given_out_once_and_only_its_server_listens_there(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    port = free_port()
    anything = ports._random.randrange
    first = [port]
    monkeypatch.setattr(ports._random, "randrange", lambda *r: first.pop() if first else anything(*r))
    assert free_port() != port
    ask = "from allspark.launcher import ports\n"
    ask += f"ports._random.randrange = lambda *_: {port}\nprint(ports.free_port())"
    other = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert other.stdout == "0\n", "another process gets none rather than this one"
    for _ in range(2):  # again after it was down
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()
            with socket.socket() as second:
                second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    second.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_only_so_many_ports_stay_reserved(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ports, "_MAX_HELD", len(ports._held) + 3)
    for _ in range(10):
        free_port()
    assert len(ports._held) == ports._MAX_HELD
