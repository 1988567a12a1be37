"""SIGUSR1: what a process holds, counted without anything being registered."""

import asyncio
import json
import logging
import os
import signal
from collections import deque

import pytest
from allspark_bus import vitals


class Holder:
    def __init__(self) -> None:
        self.map = {"a": {1, 2}, "b": {3}}
        self.queue = deque([1, 2, 3])
        self.empty: list[int] = []
        self.number = 7


class Slotted:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = [1] * 5


for kind in (Holder, Slotted):
    kind.__module__ = "allspark_test"


async def test_containers_are_counted_by_class_and_attribute_with_what_is_in_them() -> None:
    kept = [Holder(), Holder(), Slotted()]
    found = vitals.sizes()
    assert found["allspark_test.Holder.map"] == 2 * (2 + 3)
    assert found["allspark_test.Holder.queue"] == 2 * 3
    assert found["allspark_test.Slotted.items"] == 5
    assert "allspark_test.Holder.empty" not in found
    assert found["tasks"] >= 1
    assert found["threads"] >= 1
    assert found["objects"] > len(kept)
    del kept
    assert "allspark_test.Holder.map" not in vitals.sizes()


async def test_signal_writes_one_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "allspark_bus.vitals")
    loop = asyncio.get_running_loop()
    vitals.listen(loop)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(20):
            while not caplog.messages:
                await asyncio.sleep(0.01)  # until the loop has noticed the signal
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
    assert json.loads(caplog.messages[0].removeprefix(vitals.MARK))["tasks"] >= 1
