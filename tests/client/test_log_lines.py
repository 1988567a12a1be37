"""The log of a process: what a message quotes from outside stays one line of bounded length."""

import logging

from allspark.cli.process import LOG_FORMAT, MAX_LINE, LineFormatter


def line_of(text: str, **more: object) -> str:
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "request %s", (text,), None)
    record.__dict__.update(more)
    return LineFormatter(LOG_FORMAT).format(record)


def test_a_uuid_cannot_write_a_line_of_its_own() -> None:
    line = line_of("u\n2026-01-01T00:00:00Z ERROR forged\r\x1b[2J\x9b\u2028\x00")
    assert len(line.splitlines()) == 1
    assert line.endswith(r"request u\n2026-01-01T00:00:00Z ERROR forged\r\x1b[2J\x9b\u2028\x00")


def test_other_characters_stay_as_they_are() -> None:
    assert line_of("größe 寸 \\n").endswith("request größe 寸 \\n")


def test_a_huge_uuid_does_not_fill_the_log() -> None:
    assert len(line_of("u" * (1 << 20))) == MAX_LINE + 4


def test_a_traceback_keeps_its_lines_and_looks_like_no_message() -> None:
    try:
        raise ValueError("x\n2026-01-01T00:00:00Z ERROR forged")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    first, *others = line_of("u", exc_info=info).splitlines()
    assert first.endswith("request u")
    assert len(others) >= 4
    assert all(line.startswith("  ") for line in others)
