"""When a worker decides that it is dead (R13)."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from allspark_bus.ledger import Ending
from allspark_workers.publisher import Publication
from allspark_workers.watchdog import LONGEST_S, LOOK_S, Watchdog

STALL_S = 10.0


class Scene:
    """One model and one request that waits for it."""

    def __init__(self) -> None:
        self.engine = object()
        self.now_s = 0.0
        self.stalled_s = 0.0
        self.model = SimpleNamespace(
            name="m", engine=self.engine, is_idle=True, seconds_since_step=lambda: self.stalled_s
        )
        self.request = Publication("t/u", "m", 1, cast(Any, self.engine))
        self.watchdog = Watchdog(
            lambda: [cast(Any, self.model)], lambda: [self.request], STALL_S, lambda: self.now_s
        )

    def after(self, seconds: float) -> str:
        """The verdict then, with looks in between."""
        until_s = self.now_s + seconds
        while (left_s := until_s - self.now_s) > LOOK_S:
            self.now_s += min(LOOK_S, left_s)
            assert self.watchdog.verdict() == ""
        self.now_s = until_s
        return self.watchdog.verdict()

    def after_a_stop(self, seconds: float) -> str:
        """The verdict when this process goes on after it was stopped for so long."""
        self.now_s += seconds
        return self.watchdog.verdict()


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    assert made.watchdog.verdict() == ""
    return made


def test_a_step_that_does_not_end(scene: Scene) -> None:
    scene.model.is_idle, scene.stalled_s = False, 9.9
    assert scene.after(9.9) == ""
    scene.stalled_s = 10.1
    assert "no step for 10.1 s" in scene.after(0.2)


def test_an_idle_engine_while_a_request_waits(scene: Scene) -> None:
    assert scene.after(10.0) == ""
    assert "t/u" in scene.after(0.1)


def test_a_process_that_was_stopped_takes_its_own_absence_for_no_stall(scene: Scene) -> None:
    scene.model.is_idle, scene.stalled_s = False, 3600.0
    assert scene.after_a_stop(3600.0) == ""
    assert scene.after(STALL_S - LONGEST_S) == ""
    assert "no step for 10.1 s" in scene.after(0.1), "what is stuck since then is found"
    other = Scene()
    other.after(0.0)
    assert other.after_a_stop(3600.0) == ""
    assert other.after(STALL_S - LONGEST_S) == "" != other.after(0.1)


@pytest.mark.parametrize("why", ["busy", "held", "cancelled", "ended"])
def test_what_is_no_stall(scene: Scene, why: str) -> None:
    scene.after(9.0)
    if why == "busy":
        scene.model.is_idle = False
    elif why == "held":
        scene.request.is_held = True
    elif why == "cancelled":
        scene.request.is_cancelled = True
    else:
        scene.request.ending = Ending(3, "stopped")
    assert scene.after(5.0) == "", "and the time begins again"
    scene.model.is_idle, scene.request.is_held, scene.request.is_cancelled = True, False, False
    scene.request.ending = None
    assert scene.after(0.0) == ""
    assert scene.after(10.0) == ""
    assert scene.after(0.1) != ""
