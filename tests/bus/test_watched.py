"""Files that change while a process runs."""

import logging
from pathlib import Path

import pytest
from allspark_bus.watched import LOOK_AGAIN_S, Watched, stamp


class Number:
    """A file with a number in it, watched with a clock that the test moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = 0.0
        self.watched = Watched(
            "the numbers", lambda: [stamp(path)], self._read, ValueError, lambda: self.clock
        )

    def _read(self) -> int:
        return int(self.path.read_text())

    def write(self, text: str) -> None:
        new = self.path.with_suffix(".new")  # another inode: no two writings look the same
        new.write_text(text)
        new.replace(self.path)

    def later(self) -> int:
        self.clock += LOOK_AGAIN_S
        return self.watched.now()


@pytest.fixture
def number(tmp_path: Path) -> Number:
    (tmp_path / "n").write_text("1")
    return Number(tmp_path / "n")


def test_a_change_counts_at_the_next_look(number: Number) -> None:
    number.write("2")
    assert number.watched.now() == 1, "not looked at yet"
    assert number.later() == 2


def test_a_bad_or_missing_file_changes_nothing_and_is_told_once(
    number: Number, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    number.write("two")
    assert [number.later(), number.later(), number.later()] == [1, 1, 1]
    assert [r.getMessage() for r in caplog.records] == [
        "the numbers stay as they were: invalid literal for int() with base 10: 'two'"
    ]
    number.path.unlink()
    assert number.later() == 1
    assert len(caplog.records) == 2
    number.write("3")
    assert number.later() == 3


def test_what_is_bad_at_first_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("one")
    with pytest.raises(ValueError, match="invalid literal"):
        Number(tmp_path / "n")
    with pytest.raises(FileNotFoundError):
        Number(tmp_path / "missing")
