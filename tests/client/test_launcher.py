"""Supervised processes: ready, restarted, given up, stopped in order, and never left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import redis
from allspark.launcher import Fleet, FleetOptions, LaunchError, ManagedProcess, State
from allspark.launcher import process as process_module
from allspark.launcher.store import lock_directory

TIMEOUT_S = 120.0

READY = "import os, sys; os.write(int(sys.argv[1]), b'{\"n\": %d}\\n' % os.getpid())\n"
BLOCK = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
SERVE = BLOCK + READY + "signal.sigwait({signal.SIGTERM})\n"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "signal.pause()\n"


def python(code: str) -> Callable[[int], Sequence[str]]:
    return lambda ready_fd: [sys.executable, "-c", code, str(ready_fd)]


@pytest.fixture(autouse=True)
def fast_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(process_module, "MAX_DELAY_S", 0.02)
    monkeypatch.setattr(process_module, "PUMP_S", TIMEOUT_S)  # the last lines count here, however late


@pytest.fixture
def launch() -> Iterator[Callable[..., ManagedProcess]]:
    processes: list[ManagedProcess] = []

    def start(code: str, **options: object) -> ManagedProcess:
        process = ManagedProcess("child", python(code), **options)  # type: ignore[arg-type]
        processes.append(process)
        process.start()
        return process

    yield start
    for process in processes:
        process.stop(0.0)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


Launch = Callable[..., ManagedProcess]


def test_ready_line_arrives(launch: Launch) -> None:
    process = launch(SERVE)
    assert process.wait_ready(TIMEOUT_S) == {"n": process.pid}
    assert process.state is State.READY


def test_ready_by_a_line_of_the_log(launch: Launch) -> None:
    process = launch("print('now READY', flush=True); import signal; signal.pause()", ready_text="READY")
    assert process.wait_ready(TIMEOUT_S) == {}


def test_killed_process_comes_back_with_what_it_had(launch: Launch) -> None:
    process = launch(SERVE)
    first = process.wait_ready(TIMEOUT_S)["n"]
    process.kill()
    second = process.wait_ready(TIMEOUT_S, num_starts=2)["n"]

    assert first != second
    assert (process.num_starts, process.pid) == (2, second)
    assert not is_alive(first)


def test_killed_for_good_stays_dead(launch: Launch) -> None:
    process = launch(SERVE)
    process.wait_ready(TIMEOUT_S)
    process.kill(restart=False)
    assert process.wait_exit(TIMEOUT_S) == -signal.SIGKILL
    assert (process.state, process.num_starts, process.pid) == (State.STOPPED, 1, None)


def test_process_that_keeps_failing_is_given_up(launch: Launch) -> None:
    process = launch(READY + "sys.exit(3)")
    assert process.wait_exit(TIMEOUT_S) == 3
    assert process.state is State.FAILED
    assert process.num_starts == process_module.MAX_RESTARTS + 1


def test_process_that_ends_on_purpose_is_not_restarted(launch: Launch) -> None:
    process = launch(READY)
    assert process.wait_exit(TIMEOUT_S) == 0
    assert (process.state, process.num_starts) == (State.EXITED, 1)


def test_failing_start_is_told_with_the_last_lines(launch: Launch) -> None:
    process = launch("import sys; print('no such device', file=sys.stderr); sys.exit(4)")
    with pytest.raises(LaunchError, match=r"exit status 4\n  no such device"):
        process.wait_ready(TIMEOUT_S)


def test_program_that_is_not_there() -> None:
    process = ManagedProcess("child", lambda ready_fd: ["/no/such/program"])
    process.start()
    with pytest.raises(LaunchError, match="No such file"):
        process.wait_ready(TIMEOUT_S)
    process.stop(0.0)


def test_stop_asks_first(launch: Launch) -> None:
    process = launch(SERVE + "print('drained', flush=True)")
    process.wait_ready(TIMEOUT_S)
    process.stop(TIMEOUT_S)
    assert (process.state, process.exit_code, process.last_lines) == (State.STOPPED, 0, ["drained"])
    process.stop(TIMEOUT_S)


def test_stop_insists(launch: Launch) -> None:
    process = launch(STUBBORN)
    process.wait_ready(TIMEOUT_S)
    process.stop(0.05)
    assert (process.state, process.exit_code) == (State.STOPPED, -signal.SIGKILL)


def test_lines_are_passed_on_and_only_the_last_are_kept(launch: Launch) -> None:
    lines: list[tuple[str, str]] = []
    process = launch(
        READY + "print(*range(100), sep='\\n')", report=lambda name, line: lines.append((name, line))
    )
    process.wait_exit(TIMEOUT_S)
    assert lines == [("child", str(number)) for number in range(100)]
    assert process.last_lines == [str(number) for number in range(100 - process_module.KEPT_LINES, 100)]


def test_child_does_not_get_the_terminals_interrupt(launch: Launch) -> None:
    process = launch(READY.replace("getpid()", "getsid(0)") + "import signal; signal.pause()")
    assert process.wait_ready(TIMEOUT_S) == {"n": process.pid}


def test_children_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import sys, signal
        from allspark.launcher import Fleet, FleetOptions, ManagedProcess
        fleet = Fleet(FleetOptions(workers=0))
        fleet._start_store()
        child = ManagedProcess("child", lambda fd: [sys.executable, "-c", {SERVE!r}, str(fd)])
        child.start()
        child.wait_ready({TIMEOUT_S})
        print(child.pid, fleet.store.pid, flush=True)
        signal.pause()
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
        descriptors = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
    for descriptor in descriptors:
        wait_for_exit(descriptor)


def wait_for_exit(pidfd: int) -> None:
    import select

    readable, _, _ = select.select([pidfd], [], [], TIMEOUT_S)
    os.close(pidfd)
    assert readable, "a child outlived its launcher"


# ---- the store ----------------------------------------------------------------------------------------


class StoreOnly(Fleet):
    """A fleet of which only the store is started."""

    def start(self) -> None:
        self._start_store()


def client_of(fleet: Fleet) -> redis.Redis:
    return redis.Redis.from_url(fleet.redis_url)


def test_store_keeps_its_data_over_a_kill_and_a_new_fleet(tmp_path: Path) -> None:
    options = FleetOptions(data_dir=tmp_path / "data")
    with StoreOnly(options) as fleet:
        assert client_of(fleet).config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        client_of(fleet).set("k", "v")
        client_of(fleet).execute_command("WAITAOF", 1, 0, 5000)
        assert fleet.store is not None
        fleet.store.kill()
        fleet.store.wait_ready(TIMEOUT_S, num_starts=2)
        assert client_of(fleet).get("k") == b"v"
    with StoreOnly(options) as fleet:
        assert client_of(fleet).get("k") == b"v"


def test_one_fleet_per_data_directory(tmp_path: Path) -> None:
    held = lock_directory(tmp_path)
    fleet = StoreOnly(FleetOptions(data_dir=tmp_path))
    owner = f"in use by process {os.getpid()}; name another one with --data-dir"
    with pytest.raises(LaunchError, match=owner):
        fleet.start()
    held.close()
    fleet.stop()
    lock_directory(tmp_path).close()


def test_temporary_directory_goes_with_the_fleet() -> None:
    with StoreOnly(FleetOptions()) as fleet:
        socket = Path(fleet.redis_url.removeprefix("unix://"))
        assert socket.is_socket()
    assert not socket.parent.exists()


def test_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(FleetOptions(broker_args=("--no-such-flag",)))
    with pytest.raises(LaunchError, match="unrecognized arguments: --no-such-flag"):
        fleet.start()
    assert [process.pid for process in fleet.processes.values()] == [None, None]
    assert not Path(fleet.redis_url.removeprefix("unix://")).parent.exists()


# ---- what a fleet consists of -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gateways", "grpc", "expected"),
    [
        (1, ("a:1", "unix:/x"), [("a:1", "unix:/x")]),
        (3, ("h:50051",), [("h:50051",), ("h:50052",), ("h:50053",)]),
        (2, ("[::1]:7",), [("[::1]:7",), ("[::1]:8",)]),
        (2, ("h:0",), [("h:0",), ("h:0",)]),
        (2, ("unix:/x",), [("unix:/x",), ("unix:/x.1",)]),
        (2, ("h:1", "unix:/x"), [("h:1",), ("unix:/x",)]),
        (2, ("h:1", "h:2", "unix:/x", "unix:/y"), [("h:1", "unix:/x"), ("h:2", "unix:/y")]),
    ],
)
def test_addresses_of_gateways(gateways: int, grpc: tuple[str, ...], expected: list[tuple[str, ...]]) -> None:
    assert FleetOptions(gateways=gateways, grpc=grpc).gateway_addresses() == expected


def test_impossible_options() -> None:
    with pytest.raises(ValueError, match="for each gateway"):
        FleetOptions(gateways=3, grpc=("a:1", "a:2"))
    with pytest.raises(ValueError, match="brokers is 0"):
        FleetOptions(brokers=0)


def test_devices_and_threads_of_workers() -> None:
    spread = FleetOptions(workers=2, device="cuda")
    assert [spread.worker_device(index) for index in range(2)] == ["cuda:0", "cuda:1"]
    assert FleetOptions(workers=2, device="cuda:3").worker_device(1) == "cuda:3"
    assert FleetOptions(workers=1).worker_threads() == 0
    assert FleetOptions(workers=10_000).worker_threads() == 1


def test_fleet_is_over_when_every_gateway_has_left_on_purpose() -> None:
    fleet = Fleet(FleetOptions())
    for _ in range(2):
        gateway = ManagedProcess("gateway", python(READY), on_change=fleet._notify)
        fleet.gateways.append(gateway)
    assert not fleet.wait(0.0)
    for gateway in fleet.gateways:
        gateway.start()
    assert fleet.wait(TIMEOUT_S)
    assert fleet.is_over() and not fleet.problem()


def test_fleet_has_a_problem_when_a_process_is_given_up() -> None:
    fleet = Fleet(FleetOptions())
    broken = ManagedProcess("worker-0", python("raise SystemExit(9)"), on_change=fleet._notify)
    fleet.workers.append(broken)
    done = threading.Event()
    threading.Thread(target=lambda: (fleet.wait(TIMEOUT_S), done.set()), daemon=True).start()
    broken.start()
    assert done.wait(TIMEOUT_S)
    assert fleet.problem() == "worker-0 keeps failing (exit status 9) and was given up"
