"""Ports for servers that are restarted under the address they had.

Port 0 gives one of the range that outgoing connections take theirs from. While such a server is down, a
client on the same machine that tries to reach it again and again may get that very port as its own and
connect to itself (simultaneous open, RFC 9293 section 3.5): it talks to nobody, and the server cannot bind.

Nor may another fleet on the machine be given the port before the server has bound it, or while it is down. So
this process stays bound to it, without listening, and shares it (SO_REUSEADDR) with who listens, as servers
ask for on Linux.
"""

import contextlib
import random
import socket
from collections import deque
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_TAKEN = 32768  # where Linux starts unless told otherwise
_LOWEST = 10_000
_ATTEMPTS = 100
_MAX_HELD = 256  # the ports given out last stay reserved, each by a socket
_random = random.SystemRandom()
_held: deque[socket.socket] = deque()


def free_port(host: str = "127.0.0.1") -> int:
    """A free TCP port below those of outgoing connections; 0, for any, if none is found there.

    No other call, in any process, returns it while this process lives (or has returned 256 others since).
    """
    try:
        highest = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        highest = _FIRST_TAKEN
    for _ in range(_ATTEMPTS if highest > _LOWEST else 0):
        port = _random.randrange(_LOWEST, highest)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError):
            _hold(socket.socket(family, socket.SOCK_STREAM), host, port)
            return port
    return 0


def _hold(s: socket.socket, host: str, port: int) -> None:
    """Raises OSError if anybody is bound to the port."""
    try:
        s.bind((host, port))
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: the port was nobody's
    except OSError:
        s.close()
        raise
    _held.append(s)
    if len(_held) > _MAX_HELD:
        _held.popleft().close()
