"""docs/field-reports.md names a test for every row, and each of them exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| (\d+) \| .* \| (.+) \|$", (ROOT / "docs/field-reports.md").read_text(encoding="utf-8"), re.MULTILINE
)
CONFORMANCE = "\n".join(
    p.read_text(encoding="utf-8") for p in (ROOT / "tests/conformance/cases").glob("*.py")
)


def test_every_report_has_a_row() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 25))


@pytest.mark.parametrize(("number", "tests"), ROWS)
def test_named_tests_exist(number: str, tests: str) -> None:
    names = re.findall(r"`([^`]+)`", tests)
    assert names
    for name in names:
        if name.startswith("tests/conformance: "):
            case = name.partition(": ")[2]
            is_row = f'"{re.sub(r" [0-9]+$", "", case)}"' in CONFORMANCE
            assert is_row or f"def {case.replace(' ', '_')}(" in CONFORMANCE, f"row {number}: {name}"
            continue
        path, _, function = name.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE), f"row {number}: {name}"
