"""Runs the table of cases against the server, one test for each row; no field may be without a case."""

from collections.abc import Callable

import pytest

from tests.conformance import cases
from tests.conformance.conftest import FIELD
from tests.conformance.server import Server
from tests.conformance.suite import ALL_FIELDS, CASES, Case

cases.load()


def _parameter(row: Case) -> object:
    marks = [pytest.mark.xfail(reason=f"waits for: {row.waits_for}", strict=True)] if row.waits_for else []
    return pytest.param(row, id=row.id, marks=marks)


@pytest.mark.parametrize("row", [_parameter(row) for row in CASES])
def test_case(server: Server, record_property: Callable[[str, object], None], row: Case) -> None:
    for name in row.fields:
        record_property(FIELD, name)
    row.run(server)


def test_every_field_of_every_message_has_a_case() -> None:
    covered = {name for row in CASES for name in row.fields}
    assert [name for name in ALL_FIELDS if name not in covered] == []
