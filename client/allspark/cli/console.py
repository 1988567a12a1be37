"""The terminal: results go to standard output, everything else to standard error."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on standard error; they vanish when done, and off a terminal there are none."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        yield bars


@contextmanager
def activity(text: str) -> Iterator[None]:
    """One bar without a known length while something is going on."""
    with progress() as bars:
        bars.add_task(text, total=None)
        yield


__all__ = ["Progress", "TaskID", "activity", "err", "out", "progress"]
