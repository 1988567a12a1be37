"""The server under test: a fleet of its own, or the one that `--target` names; and the table in the end."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite(
    "tests.conformance.server", "tests.conformance.oracle", "tests.conformance.cases"
)

from allspark.launcher import Fleet, FleetOptions  # noqa: E402

from tests.conformance import tiny_model  # noqa: E402
from tests.conformance.server import OK, Server  # noqa: E402

FIELD = "conformance-field"


OPTIONS = {
    "--target": "server to examine; repeat for several gateways of one server. Default: a fleet is started",
    "--target-model": "model directory as the target's workers see it; the reference reads the same path",
    "--target-other-tenant": "address of the target whose callers are another tenant; without it cases on "
    "tenants are skipped",
    "--target-profiles": "the target measures its operators, so GetOpProfilingInfo must have their table",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance suite of the AllSpark service")
    for name, text in OPTIONS.items():
        if name == "--target-profiles":
            group.addoption(name, action="store_true", help=text)
            continue
        action = "append" if name == "--target" else "store"
        group.addoption(name, action=action, default=[] if action == "append" else "", help=text)


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if targets := pytestconfig.getoption("--target"):
        path = pytestconfig.getoption("--target-model")
        if not path:
            raise pytest.UsageError("--target needs --target-model")
        examined = Server(targets, path, pytestconfig.getoption("--target-other-tenant"), path)
        examined.profiles = pytestconfig.getoption("--target-profiles")
        yield from _with_main_model(examined)
        return
    root = tmp_path_factory.mktemp("conformance")
    model = tiny_model.write(root / "model")
    options = FleetOptions(
        gateways=2,
        workers=3,
        grpc=("127.0.0.1:0", "127.0.0.1:0", f"unix:{root}/a.sock", f"unix:{root}/b.sock"),
        model_roots=(root,),
        worker_args=("--kv-memory=24MiB", "--profile"),
        drain_s=5.0,
        gateway_args=("--redelivery-s=60",),  # no token twice, though a gateway does not run for a while
        start_timeout_s=300.0,
    )
    with Fleet(options, lambda name, line: print(f"{name} | {line}")) as fleet:
        tcp = [a for a in fleet.addresses if not a.startswith("unix:")]
        other = next(a for a in fleet.addresses if a.startswith("unix:"))
        yield from _with_main_model(Server(tcp, str(model), other, str(model), profiles=True))


def _with_main_model(examined: Server) -> Iterator[Server]:
    examined.release_kept()
    assert examined.build(examined.main, engine_max_length=0) == OK
    assert examined.status("StartModel", examined.main) == OK
    yield examined
    examined.release_kept()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Message field -> cases -> passed, failed, waiting for a feature."""
    table: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            for key, value in getattr(report, "user_properties", ()):
                if key == FIELD and (report.when == "call" or outcome in ("error", "skipped")):
                    table[value][_column(outcome)] += 1
    if not table:
        return
    from tests.conformance.suite import ALL_FIELDS

    terminalreporter.section("conformance")
    width = max(map(len, ALL_FIELDS))
    terminalreporter.line(f"{'message field':<{width}} cases  pass  fail  skip  waiting")
    for name in ALL_FIELDS:
        row = table[name]
        counts = [sum(row.values()), *(row[c] for c in ("pass", "fail", "skip", "waiting"))]
        note = "  <- no case was run" if not counts[0] else "  <- FAILS" if row["fail"] else ""
        terminalreporter.line(f"{name:<{width}} {counts[0]:>5} {counts[1]:>5} {counts[2]:>5} {counts[3]:>5} "
                              f"{counts[4]:>8}{note}")  # fmt: skip


def _column(outcome: str) -> str:
    return {"passed": "pass", "xfailed": "waiting", "skipped": "skip"}.get(outcome, "fail")
