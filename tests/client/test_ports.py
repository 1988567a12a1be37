"""Ports of servers that come back under the address they had."""

import socket
from pathlib import Path

from allspark.launcher import ports
from allspark.launcher.ports import free_port


def test_a_client_of_a_dead_server_cannot_connect_to_itself() -> None:
    """No outgoing connection is given a port of this range, so none can meet itself there."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {free_port() for _ in range(50)}
    assert all(0 < port < lowest for port in found)
    assert len(found) > 25, "two fleets that start at once seldom choose the same"


def test_a_port_in_use_is_not_chosen(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    with socket.socket() as s:
        s.bind(("127.0.0.1", free_port()))
        taken = s.getsockname()[1]
        first = [taken, taken]
        anything = ports._random.randrange
        monkeypatch.setattr(ports._random, "randrange", lambda *r: first.pop() if first else anything(*r))
        assert free_port() != taken
        assert not first
