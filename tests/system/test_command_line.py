"""`allspark up` and the commands that talk to it, as a person runs them, with the real model."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from allspark import demo_model

START_TIMEOUT_S = 300.0
COMMAND = [sys.executable, "-m", "allspark.cli"]
pytestmark = pytest.mark.slow


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ALLSPARK_")}
    return {**kept, "ALLSPARK_TIMEOUT_S": str(START_TIMEOUT_S), **more}


def allspark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=START_TIMEOUT_S, env=environment(), check=False
    )


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`allspark status` once all is well: on a busy machine a gateway may be unready for a moment."""
    limit_s = time.monotonic() + START_TIMEOUT_S
    while (done := allspark("status", *arguments)).returncode:
        assert time.monotonic() < limit_s, done.stderr
    return done


class Up(NamedTuple):
    """A running `allspark up`."""

    process: subprocess.Popen[str]
    shown: str

    @property
    def addresses(self) -> list[str]:
        return re.findall(r"127\.0\.0\.1:\d+", self.line("gRPC"))

    @property
    def frontend(self) -> str:
        return self.line("ZeroMQ").split()[1]

    @property
    def worker_pid(self) -> int:
        return int(self.line("workers").split("pid ")[1].rstrip(")\n"))

    def line(self, label: str) -> str:
        return next(line for line in self.shown.splitlines() if line.strip().startswith(label))

    @property
    def grpc(self) -> list[str]:
        return [f"--grpc={address}" for address in self.addresses]


def read_until(stream: IO[str], wanted: str) -> str:
    """Everything up to a line that contains ``wanted``; fails if none comes."""
    shown = b""
    # Not readline: what it has buffered no select sees, and lines that come together would wait for ever.
    while select.select([stream], [], [], START_TIMEOUT_S)[0]:
        read = os.read(stream.fileno(), 65536)
        shown += read
        if wanted.encode() in shown.rpartition(b"\n")[0]:
            return shown.decode()
        if not read:
            break
    raise AssertionError(f"{wanted!r} did not come; shown: {shown.decode()}")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("state")
    flags = ["--model=smollm2", "--gateways=2", "--grpc=127.0.0.1:0", "--max-length=512", "--drain-s=10"]
    flags.append(f"--start-timeout-s={START_TIMEOUT_S}")
    demo_model.fetch()
    with subprocess.Popen(
        [*COMMAND, "up", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        env=environment(XDG_STATE_HOME=str(state)),
    ) as process:
        try:
            assert process.stdout is not None
            yield Up(process, read_until(process.stdout, "allspark generate"))
        finally:
            process.kill()


def test_status_block_tells_how_to_go_on(up: Up) -> None:
    assert "smollm2" in up.line("models")
    assert len(set(up.addresses)) == 2
    assert "allspark generate --chat 'What is the capital of France?'" in up.shown


def test_generate_answers_through_either_gateway(up: Up) -> None:
    for address in up.grpc:
        done = allspark(
            "generate", "--chat", "What is the capital of France?", address, "--max-new-tokens=32"
        )
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
        # An answer that comes at once has no speed after its first token.
        assert re.search(
            r"\d+ tokens, ([\d.]+ tokens/s, )?first token after \d+ ms, ended by eos", done.stderr
        )


def test_generate_follows_a_schema_a_regex_or_a_grammar(up: Up, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"enum": ["Paris", "größer"]}', encoding="utf-8")
    grammar.write_text('root ::= "It is " ("Paris" | "Rome") "."', encoding="utf-8")
    for flag, expected in [
        (f"--json-schema={schema}", '"Paris"\n'),
        ("--regex=(Rome|Paris)!{3}", "Paris!!!\n"),
        (f"--grammar={grammar}", "It is Paris.\n"),
    ]:
        done = allspark("generate", "--chat", "What is the capital of France?", *up.grpc, flag, "--no-stats")
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    missing = allspark("generate", "Hi", *up.grpc, f"--json-schema={tmp_path}/none.json")
    assert (missing.returncode, "cannot read" in missing.stderr) == (1, True), missing.stderr
    broken = allspark("generate", "Hi", *up.grpc, "--regex=(a")
    assert (broken.returncode, "unclosed group" in broken.stderr) == (1, True), broken.stderr


def test_sampled_text_depends_on_the_seed_only(up: Up) -> None:
    def sample(seed: int) -> str:
        flags = ["--do-sample", "--temperature=0.9", f"--seed={seed}", "--max-new-tokens=12", "--no-stats"]
        done = allspark("generate", "Once upon a time", *up.grpc, *flags)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert sample(1) == sample(1) != sample(2)


def test_interrupted_generate_releases_its_request(up: Up) -> None:
    def stat() -> dict[str, Any]:
        report = json.loads(status(*up.grpc, "--model=smollm2", "--json").stdout)
        return dict(report["stats"][0])

    before = stat()  # spans that hold cached prompts of other tests are used
    command = [*COMMAND, "generate", "Once upon a time", *up.grpc, "--max-new-tokens=400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 130
    limit_s = time.monotonic() + START_TIMEOUT_S
    while True:  # its engine lets go of it after a step
        after = stat()
        if (after["running_request"], after["pendding_request"]) == (0, 0):
            break
        assert time.monotonic() < limit_s, after
    assert int(after["used_span"]) <= int(before["used_span"])


def test_status_lists_models_and_workers(up: Up) -> None:
    done = status(*up.grpc, f"--broker={up.frontend}", "--json")
    report = json.loads(done.stdout)
    (broker,) = report["brokers"]
    assert [(model["name"], model["state"], model["workers"]) for model in broker["models"]] == [
        ("smollm2", "running", 1)
    ]
    assert [worker["device"] for worker in broker["workers"]] == ["cpu"]
    assert all("error" not in gateway for gateway in report["gateways"])
    tables = status(*up.grpc, f"--broker={up.frontend}").stdout
    assert all(address in tables for address in up.addresses)
    assert "smollm2" in tables


def test_status_as_a_health_check(up: Up) -> None:
    worker = json.loads(status(f"--broker={up.frontend}", "--json").stdout)["brokers"][0]["workers"][0]
    known, unknown = worker["worker_id"][:4], "nobody"
    assert status(f"--broker={up.frontend}", f"--expect-worker={known}").returncode == 0
    missing = allspark("status", f"--broker={up.frontend}", f"--expect-worker={unknown}")
    assert (missing.returncode, "no broker lists a worker nobody" in missing.stderr) == (1, True)
    dead = allspark("status", "--grpc=127.0.0.1:1", "--timeout-s=0.5")
    assert (dead.returncode, "no answer from 127.0.0.1:1" in dead.stderr) == (1, True)


def test_load_gives_a_model_a_second_name_and_refuses_other_places(up: Up) -> None:
    path = demo_model.fetch()
    done = allspark("load", f"--model={path}=again", up.grpc[0], "--max-length=64", "--max-batch=1")
    assert done.returncode == 0, done.stderr
    assert "again is running" in done.stdout
    outside = allspark("load", "--model=/etc=etc", up.grpc[0])
    assert (outside.returncode, "model root" in outside.stderr) == (1, True), outside.stderr


def test_refusal_is_told_with_its_reason(up: Up) -> None:
    unknown = allspark("generate", "Hi", *up.grpc, "--model=nope", f"--tokenizer={demo_model.fetch()}")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "nope" in unknown.stderr and "Traceback" not in unknown.stderr
    too_long = allspark("generate", "Hi", *up.grpc, "--max-new-tokens=5000")
    assert (too_long.returncode, "EXCEED_LIMIT" in too_long.stderr) == (1, True)


def test_second_fleet_on_the_same_data_is_refused(up: Up) -> None:
    state = Path(f"/proc/{up.process.pid}/environ").read_bytes().split(b"XDG_STATE_HOME=")[1].split(b"\0")[0]
    done = allspark("up", "--grpc=127.0.0.1:0", f"--data-dir={state.decode()}/allspark")
    assert (done.returncode, f"in use by process {up.process.pid}" in done.stderr) == (1, True), done.stderr


def test_killed_worker_is_replaced(up: Up) -> None:
    """The catalogue tells the new one what to load, so the next answer comes without anybody's help."""
    os.kill(up.worker_pid, signal.SIGKILL)
    done = allspark("generate", "--chat", "What is the capital of France?", *up.grpc, "--max-new-tokens=32")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def test_sigterm_drains_and_leaves_nothing(up: Up) -> None:
    """Last in this file: it ends the fleet."""
    children = children_of(up.process.pid)
    assert len(children) == 5  # store, broker, two gateways, worker
    descriptors = [os.pidfd_open(child) for child in children]
    up.process.send_signal(signal.SIGTERM)
    assert up.process.stdout is not None
    rest = up.process.stdout.read()
    assert up.process.wait() == 0, rest
    assert "Traceback" not in rest
    ended = select.select(descriptors, [], [], 0)[0]
    for descriptor in descriptors:
        os.close(descriptor)
    assert len(ended) == len(children)
