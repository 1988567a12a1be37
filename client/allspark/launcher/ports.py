"""Ports for servers that are restarted under the address they had.

Port 0 gives one of the range that outgoing connections take theirs from. While such a server is down, a
client on the same machine that tries to reach it again and again may get that very port as its own and
connect to itself (simultaneous open, RFC 9293 section 3.5): it talks to nobody, and the server cannot bind.
"""

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_TAKEN = 32768  # where Linux starts unless told otherwise
_LOWEST = 10_000
_ATTEMPTS = 100
_random = random.SystemRandom()


def free_port(host: str = "127.0.0.1") -> int:
    """A free TCP port below those of outgoing connections; 0, for any, if none is found there."""
    try:
        highest = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        highest = _FIRST_TAKEN
    for _ in range(_ATTEMPTS if highest > _LOWEST else 0):
        port = _random.randrange(_LOWEST, highest)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as s:
            s.bind((host, port))
            return port
    return 0
