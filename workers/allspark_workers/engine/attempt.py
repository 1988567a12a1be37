"""Compute the rows of a step so that a request which makes it fail fails alone."""

from __future__ import annotations

import logging

import torch

from allspark_workers.engine.errors import GroupError
from allspark_workers.engine.runner import Result, Runner
from allspark_workers.engine.step_plan import Row

logger = logging.getLogger(__name__)


def attempt(runner: Runner, rows: list[Row], is_profiled: bool, has_ranks: bool) -> list[Result | Exception]:
    """Per row: its result (None if it does not sample yet), or why it failed.

    A step that fails is run again with each request alone. Raises torch.AcceleratorError when the device's
    context is lost, and GroupError where other ranks (`has_ranks`) may be at a different place of the step:
    nothing in this process can go on then.
    """
    try:
        return _spread(rows, runner.run(rows, is_profiled))
    except torch.AcceleratorError:
        raise
    except Exception as error:
        if has_ranks:
            raise GroupError(f"a step over several devices failed: {error}") from error
        logger.warning("a step of %d requests failed (%s): running each alone", len(rows), error)
        runner.forget(rows)
    results: list[Result | Exception] = []
    for row in rows:
        try:
            results += _spread([row], runner.run([row], is_profiled))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            logger.exception("request %s failed in its step", row.sequence.request_id)
            runner.forget([row])
            results.append(error)
    return results


def _spread(rows: list[Row], results: list[Result]) -> list[Result | Exception]:
    found = iter(results)
    return [next(found) if row.samples else None for row in rows]
