"""What the launcher raises."""

from collections.abc import Sequence


class LaunchError(RuntimeError):
    """A part of the fleet cannot be started; the text holds the last lines that it wrote."""

    def __init__(self, message: str, last_lines: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([message, *last_lines]))
