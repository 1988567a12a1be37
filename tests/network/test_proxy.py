"""The proxy does to connections what the tests of cuts rely on."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.network.proxy import CLEAR, FAULTS, Link, Network, Proxy

PATIENCE_S = 60.0
SILENCE_S = 0.3  # for bytes that must not come


class Echo:
    """A server that answers every chunk with it, and counts what it heard."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard = b""
        self.changed = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(end,), daemon=True).start()

    def _echo(self, end: socket.socket) -> None:
        with end:
            while True:
                try:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    with self.changed:
                        self.heard += data
                        self.changed.notify_all()
                    end.sendall(data)
                except OSError:
                    return

    def hears(self, data: bytes) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.heard.endswith(data), PATIENCE_S)


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.listener.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Network() as network:
        yield network.proxy("p", echo.address)


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S)


def ask(end: socket.socket, data: bytes) -> bytes:
    end.settimeout(PATIENCE_S)
    end.sendall(data)
    answer = b""
    while len(answer) < len(data):
        answer += end.recv(1 << 16)
    return answer


def is_silent(end: socket.socket) -> bool:
    end.settimeout(SILENCE_S)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    return False


def test_what_is_forwarded_arrives_unchanged(proxy: Proxy) -> None:
    data = bytes(range(256)) * 4000
    for link in (CLEAR, Link(delay_s=0.01), Link(bytes_per_s=20_000_000)):
        proxy.set(link)
        with connect(proxy) as end:
            sender = threading.Thread(target=lambda e=end: e.sendall(data))
            sender.start()
            answer = b""
            while len(answer) < len(data):
                answer += end.recv(1 << 16)
            sender.join()
            assert answer == data
            end.shutdown(socket.SHUT_WR)
            assert end.recv(1) == b"", "the end of a connection arrives too"


@pytest.mark.parametrize("fault", ["cut", "cut-up", "cut-down"])
def test_a_connection_of_a_cut_stays_silent_and_new_ones_work(proxy: Proxy, echo: Echo, fault: str) -> None:
    with connect(proxy) as old:
        assert ask(old, b"before") == b"before"
        proxy.set(FAULTS[fault])
        old.sendall(b"during")
        assert is_silent(old)
        assert echo.hears(b"during" if fault == "cut-down" else b"before")
        with connect(proxy) as born_in_it:
            born_in_it.sendall(b"born")
            assert is_silent(born_in_it)
            proxy.heal()
            assert is_silent(born_in_it)
        assert b"born" not in echo.heard
        assert is_silent(old)
        with connect(proxy) as new:
            assert ask(new, b"after") == b"after"


def test_a_reset_ends_connections_at_once(proxy: Proxy) -> None:
    with connect(proxy) as old:
        assert ask(old, b"before") == b"before"
        proxy.set(FAULTS["reset"])
        with pytest.raises(ConnectionResetError):
            old.recv(1)
        with pytest.raises(ConnectionError), connect(proxy) as refused:
            refused.recv(1)
    proxy.heal()
    with connect(proxy) as new:
        assert ask(new, b"after") == b"after"


def test_the_end_of_a_process_is_not_heard_of_through_a_cut(echo: Echo) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with Network() as network:
        proxy = network.proxy("p", f"127.0.0.1:{listener.getsockname()[1]}")
        client = connect(proxy)
        client.sendall(b"x")
        server, _ = listener.accept()
        server.settimeout(PATIENCE_S)
        assert server.recv(1) == b"x"
        proxy.set(FAULTS["cut-up"])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        for _ in range(3):
            server.sendall(b"y")
            assert is_silent(server), "neither an end nor a refusal"
        server.close()
    listener.close()
