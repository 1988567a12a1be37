"""A whole fleet on this machine as one object."""

import asyncio
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from allspark_proto import allspark_service_pb2 as pb

from allspark.client import Client, ModelOptions, StatusError
from allspark.launcher import store
from allspark.launcher.commands import COMMANDS, environment
from allspark.launcher.options import FleetOptions
from allspark.launcher.process import ManagedProcess, Report, State
from allspark.launcher.secured import Secured

STOP_MARGIN_S = 5.0


class Fleet:
    """Starts, supervises and stops the processes that ``options`` describe.

    ``report(name, line)`` gets every line that a process writes. All methods may be called from any thread.
    """

    def __init__(self, options: FleetOptions | None = None, report: Report = lambda name, line: None) -> None:
        self.options = options or FleetOptions()
        self.brokers: list[ManagedProcess] = []
        self.gateways: list[ManagedProcess] = []
        self.workers: list[ManagedProcess] = []
        self.store: ManagedProcess | None = None
        self.redis_url = self.options.redis or ""
        self.secured = Secured(self.options.secure.absolute()) if self.options.secure else None
        self._report = report
        self._changed = threading.Condition()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._lock: IO[str] | None = None

    @property
    def processes(self) -> dict[str, ManagedProcess]:
        """Every process by its name, in the order in which they were started."""
        first = [self.store] if self.store else []
        return {p.name: p for p in [*first, *self.brokers, *self.gateways, *self.workers]}

    @property
    def addresses(self) -> list[str]:
        """The gRPC addresses that are bound, of all gateways."""
        return [address for gateway in self.gateways for address in gateway.ready.get("grpc", ())]

    @property
    def frontends(self) -> list[str]:
        """The brokers' endpoints for producers."""
        return [broker.ready["frontend"] for broker in self.brokers]

    @property
    def backends(self) -> list[str]:
        """The brokers' endpoints for workers."""
        return [broker.ready["backend"] for broker in self.brokers]

    def start(self) -> None:
        """Start everything, return when all is ready; after a ``LaunchError`` nothing is left running."""
        try:
            self._start_store()
            self._wait_ready(self._launch("broker", self.brokers, self.options.brokers))
            # Workers take longest and gateways do not need them, so both start at once.
            workers = self._launch("worker", self.workers, self.options.workers)
            self._wait_ready(self._launch("gateway", self.gateways, self.options.gateways))
            self._wait_ready(workers)
        except BaseException:
            self.stop(drain=False)
            raise

    def stop(self, *, drain: bool = True) -> None:
        """Gateways, then workers, brokers and the store; each may take ``drain_s``. Safe to call twice."""
        limit_s = self.options.drain_s + STOP_MARGIN_S if drain else 0.0
        stores = [self.store] if self.store else []
        for group in (self.gateways, self.workers, self.brokers, stores):
            _stop_together(group, limit_s)
        if self._lock is not None:
            self._lock.close()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._lock = self._scratch = None

    def add_worker(self) -> ManagedProcess:
        """Start one more worker and wait until it is ready."""
        worker = self._new_process("worker", len(self.workers))
        self.workers.append(worker)
        worker.start()
        worker.wait_ready(self.options.start_timeout_s)
        return worker

    def replace(self, process: ManagedProcess) -> ManagedProcess:
        """Stop a broker, gateway or worker in order and start another in its place, on its addresses.

        One at a time, this is a rolling upgrade. Returns the new process when it is ready.
        """
        groups = {"broker": self.brokers, "gateway": self.gateways, "worker": self.workers}
        kind, _, index = process.name.partition("-")
        process.stop(self.options.drain_s + STOP_MARGIN_S)
        successor = self._new_process(kind, int(index))
        successor.ready = process.ready
        groups[kind][int(index)] = successor
        successor.start()
        successor.wait_ready(self.options.start_timeout_s)
        return successor

    def load_model(self, name: str, path: Path, options: ModelOptions | None = None) -> None:
        """Build and start a model through gRPC, as any client would; returns when it serves.

        A store that outlived an earlier fleet remembers its models and brings them up again. One of this name
        with other settings is drained and replaced.
        """
        with Client(self.addresses, access=self.secured.access() if self.secured else None) as client:
            try:
                client.build_model(name, str(path), options, is_operator=True)
            except StatusError as error:
                if error.status != pb.ALLSPARK_INVALID_CALL_ERROR:
                    raise
                _drain_model(client, name)
                client.build_model(name, str(path), options, is_operator=True)
            client.start_model(name)

    def problem(self) -> str:
        """Why the fleet cannot go on serving; empty while it can."""
        for process in self.processes.values():
            if process.state is State.FAILED:
                return f"{process.name} keeps failing (exit status {process.exit_code}) and was given up"
        return ""

    def is_over(self) -> bool:
        """True once every gateway has ended by itself: a client shut the service down."""
        return bool(self.gateways) and all(gateway.state is State.EXITED for gateway in self.gateways)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the fleet is over or has a problem; False when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over() or bool(self.problem()), timeout_s)

    def _start_store(self) -> None:
        if self.options.redis:
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="allspark-")
        scratch = Path(self._scratch.name)
        directory = (self.options.data_dir or scratch / "data").absolute()
        self._lock = store.lock_directory(directory)
        socket = scratch / "valkey.sock"
        options = self.secured.store_options() if self.secured else {}
        command = store.valkey_command(
            store.valkey_binary(), directory, socket, self.options.redis_fsync, options
        )
        self.redis_url = self.secured.store_url(socket) if self.secured else f"unix://{socket}"
        self.store = ManagedProcess(
            "store",
            lambda ready_fd: command,
            ready_text=store.READY_TEXT,
            report=self._report,
            on_change=self._notify,
        )
        self.store.start()
        self.store.wait_ready(self.options.start_timeout_s)

    def _launch(self, kind: str, group: list[ManagedProcess], count: int) -> list[ManagedProcess]:
        group += [self._new_process(kind, index) for index in range(count)]
        for process in group:
            process.start()
        return group

    def _wait_ready(self, processes: Sequence[ManagedProcess]) -> None:
        for process in processes:
            process.wait_ready(self.options.start_timeout_s)

    def command_line(self, kind: str, index: int, ready_fd: int) -> Sequence[str]:
        """What is run as the process of this kind and index; for subclasses that run something else."""
        return COMMANDS[kind](self, index, ready_fd)

    def _new_process(self, kind: str, index: int) -> ManagedProcess:
        return ManagedProcess(
            f"{kind}-{index}",
            lambda ready_fd: self.command_line(kind, index, ready_fd),
            environment=environment(self),
            report=self._report,
            on_change=self._notify,
        )

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)


def _drain_model(client: Client, name: str) -> None:
    try:
        client.stop_model(name)
    except StatusError as error:
        # Stopped all the same: this status says that there are results which nobody has released yet.
        if error.status != pb.ALLSPARK_RUNTIME_ERROR:
            raise


def _stop_together(processes: Sequence[ManagedProcess], limit_s: float) -> None:
    threads = [threading.Thread(target=process.stop, args=(limit_s,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
