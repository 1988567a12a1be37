"""Serving compiles nothing: a GPU compiles a kernel anew for each kind of argument, which takes seconds.

Without a GPU nothing is compiled, so the kinds of arguments are collected, by the rules of Triton's
just-in-time compiler: type, alignment to 16 bytes, the value 1, constants.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import allspark_kernels as kernels
import pytest
import torch
from allspark_workers.engine.engine import Engine
from engine_helpers import random_prompt, request, run_all

if torch.cuda.is_available():
    pytest.skip("a process with a GPU does not interpret kernels", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

Maker = Callable[..., Engine]
OPTIONS = ("num_warps", "num_stages")


def kind(value: Any, is_constant: bool, is_special: bool, is_aligned: bool) -> object:
    """What the compiler looks at of one argument."""
    if is_constant:
        return str(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, is_aligned and value.data_ptr() % 16 == 0
    if isinstance(value, int):
        width = 32 if -(2**31) <= value < 2**31 else 64
        return (width, is_special and value == 1, is_special and is_aligned and value % 16 == 0)
    return type(value)


def launched(kernel: InterpretedFunction, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Kernel and kinds of arguments of one launch."""
    bound = inspect.signature(kernel.fn).bind(
        *args, **{name: value for name, value in options.items() if name not in OPTIONS}
    )
    plain = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    parameters = inspect.signature(kernel.fn).parameters
    found = [
        (
            name,
            kind(
                value,
                "constexpr" in str(parameters[name].annotation),
                name not in plain,
                name not in unaligned,
            ),
        )
        for name, value in bound.arguments.items()
    ]
    return (kernel.__name__, *found, *(options.get(name) for name in OPTIONS))


@pytest.mark.parametrize("variant", ["qwen3", "gemma2", "qwen2-moe"])
def test_the_warm_up_compiles_what_requests_need(
    variant: str, make_engine: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[Any, ...]] = set()
    run = InterpretedFunction.run

    def recorded(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.add(launched(self, args, options))
        if self.__name__ == "select_kernel":  # the others' results do not matter: everything is 0
            run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    with kernels.use_backend("triton"):
        engine = make_engine(variant, max_batch=4)
        engine._runner._graphs = None  # whose kernels are compiled when they are captured
        at_start = set(seen)
        assert len({key[0] for key in at_start}) >= 12
        run_all(
            engine,
            [
                request("greedy", random_prompt(1, seed=1), 3),
                request("long", random_prompt(90, seed=2), 2, do_sample=True, top_k=3, top_p=0.5, seed=4),
                request(
                    "penalised", random_prompt(17, seed=3), 3, repetition_penalty=1.2, presence_penalty=0.3
                ),
                request("banned", random_prompt(20, seed=5), 4, bad_words=((7,), (9,)), min_length=23),
            ],
        )
    assert seen - at_start == set()
