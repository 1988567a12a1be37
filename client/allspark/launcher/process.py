"""One supervised child process: started, watched, restarted after a crash, stopped in order.

A thread of its own starts every incarnation and waits for it. The kernel ties each child to that thread
(see ``exec_child``), so children end when this process ends, whatever ends it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from allspark.launcher.errors import LaunchError

KEPT_LINES = 40
#: After so many restarts within the window a process is given up: something is wrong with it, not with luck.
MAX_RESTARTS = 8
RESTART_WINDOW_S = 120.0
FIRST_DELAY_S = 0.1
PUMP_S = 1.0
MAX_DELAY_S = 5.0
_EXEC_CHILD = str(Path(__file__).with_name("exec_child.py"))

#: Makes the command line; gets the file descriptor for the ready line.
Command = Callable[[int], Sequence[str]]
Report = Callable[[str, str], None]


class State(Enum):
    """Where a process stands."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "restarting"
    EXITED = "exited"  # by itself with status 0: it was told to, so it is not restarted
    FAILED = "failed"  # given up
    STOPPED = "stopped"  # by ``stop``


class ManagedProcess:
    """``command`` is asked anew for each incarnation, so that a restart can reuse the bound addresses.

    A process is ready when it writes one line of JSON to its ready descriptor or, for programs that know of
    none, when a line of its log contains ``ready_text``. ``environment`` adds to that of this process.
    ``report(name, line)`` gets every line it writes; ``on_change()`` runs after every change of state.
    """

    def __init__(
        self,
        name: str,
        command: Command,
        *,
        ready_text: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        report: Report = lambda name, line: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self.num_starts = 0
        self.exit_code: int | None = None
        self.state = State.STARTING
        self._command = command
        self._ready_text = ready_text
        self._environment = environment
        self._report = report
        self._on_change = on_change
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
        self._may_restart = True
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def last_lines(self) -> list[str]:
        """The end of what it wrote."""
        return list(self._lines)

    def start(self) -> None:
        """Start without waiting."""
        self._thread.start()

    def wait_ready(self, timeout_s: float, num_starts: int = 1) -> dict[str, Any]:
        """What the ``num_starts``-th or a later incarnation said when it was ready.

        Raises ``LaunchError`` if it ended for good or the time is up.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.state not in (State.STARTING, State.READY, State.BACKING_OFF)
                    or (self.state is State.READY and self.num_starts >= num_starts)
                    or (self.state is State.BACKING_OFF and num_starts == 1)
                ),
                timeout_s,
            )
            if self.state is State.READY and self.num_starts >= num_starts:
                return self.ready
        what = f"{self.name} is {self.state.value}, not ready (waited up to {timeout_s:g} s)"
        code = "" if self.exit_code is None else f"; exit status {self.exit_code}"
        raise LaunchError(what + code, self.last_lines)

    def kill(self, *, restart: bool = True) -> None:
        """Kill it the hard way; it is restarted unless told otherwise."""
        self._may_restart = self._may_restart and restart
        self.signal(signal.SIGKILL)

    def forgive(self) -> None:
        """Forget earlier restarts: the next one comes at once. For those who kill it on purpose."""
        self._restarts.clear()

    def signal(self, signum: int) -> None:
        """Send a signal, if it runs."""
        process = self._process
        if process is not None:
            process.send_signal(signum)

    def wait_exit(self, timeout_s: float) -> int | None:
        """Wait until the process has ended for good; its exit status, or None when the time is up."""
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else self.exit_code

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, wait, and SIGKILL if it takes longer than ``timeout_s``. Safe to call twice."""
        self._is_stopping.set()
        if self._thread.ident is None:
            return
        self.signal(signal.SIGTERM)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._report(self.name, f"did not end within {timeout_s:g} s after SIGTERM; killed")
            self.signal(signal.SIGKILL)
            self._thread.join()

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            started = time.monotonic()
            try:
                self._run_once()
            except OSError as error:
                self._lines.append(f"cannot be started: {error}")
                self._become(State.FAILED)
                return
            if self._is_stopping.is_set() or not self._may_restart:
                break
            if self.exit_code == 0:
                self._become(State.EXITED)
                return
            delay = self._next_delay(started)
            if delay is None:
                self._become(State.FAILED)
                return
            self._report(self.name, f"exit status {self.exit_code}; restarting in {delay:.1f} s")
            self._become(State.BACKING_OFF)
            self._is_stopping.wait(delay)
        self._become(State.STOPPED)

    def _next_delay(self, started: float) -> float | None:
        now = time.monotonic()
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTART_WINDOW_S:
            return None
        in_a_row = sum(now - at < RESTART_WINDOW_S for at in self._restarts)
        self._restarts.append(now)
        if now - started > RESTART_WINDOW_S:
            return FIRST_DELAY_S
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2**in_a_row))

    def _run_once(self) -> None:
        ready_read, ready_write = os.pipe()
        try:
            process = self._spawn(ready_write)
        finally:
            os.close(ready_write)
        self.exit_code = None
        self.num_starts += 1
        self._process = process
        self._become(State.STARTING)
        if self._is_stopping.is_set():  # asked to stop while it was being started: nobody saw the new pid
            process.terminate()
        pump = threading.Thread(target=self._pump, args=(process,), name=f"log-{self.name}", daemon=True)
        pump.start()
        try:
            self._await_ready(ready_read)
            self.exit_code = process.wait()
        finally:
            os.close(ready_read)
        pump.join(PUMP_S)  # bounded: a grandchild may hold the pipe open

    def _spawn(self, ready_fd: int) -> subprocess.Popen[bytes]:
        tied = [sys.executable, "-I", "-S", _EXEC_CHILD, str(os.getpid()), *self._command(ready_fd)]
        return subprocess.Popen(
            tied,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(ready_fd,),
            env={**os.environ, **self._environment},
            start_new_session=True,  # Ctrl-C in the terminal is for the launcher, which stops all in order
        )

    def _await_ready(self, fd: int) -> None:
        """Read the ready line, or return when the process ends without one: only it has the other end."""
        received = b""
        while not received.endswith(b"\n"):
            chunk = os.read(fd, 4096)
            if not chunk:
                return
            received += chunk
        self.ready = json.loads(received)
        self._become(State.READY)

    def _pump(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            raise AssertionError("stdout is a pipe")
        with process.stdout:
            for raw in process.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                self._lines.append(line)
                self._report(self.name, line)
                if self._ready_text and self._ready_text in line:
                    self._become(State.READY)

    def _become(self, state: State) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()
        self._on_change()
