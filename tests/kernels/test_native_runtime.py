"""Elementary functions, thread pool, and what happens without a library."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from allspark_kernels import PackedLinear, native

if not native.available():
    pytest.skip(str(native.unavailable_reason), allow_module_level=True)

from allspark_kernels.native import build, library


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = native.get_num_threads()
    yield
    native.set_num_threads(before)


def evaluate(function: int, x: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    lib = library.current.held
    call = lib.ask_evaluate_float if x.dtype == torch.float32 else lib.ask_evaluate_double
    call(function, x.data_ptr(), out.data_ptr(), len(x))
    return out


def worst_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual.double() - expected) / expected).abs().max())


def test_single_precision_functions_err_by_about_one_unit() -> None:
    x = torch.linspace(-124.9, 0, 2_000_001)
    assert worst_relative_error(evaluate(0, x), x.double().exp2()) < 1.2 * 2.0**-24 * 2
    x = torch.linspace(-87, 88, 2_000_001)
    assert worst_relative_error(evaluate(1, x), x.double().exp()) < 1.2 * 2.0**-24 * 2
    x = torch.linspace(
        -12, 12, 2_000_000
    )  # an even count: 0, where a relative error means nothing, is left out
    assert worst_relative_error(evaluate(2, x), x.double().tanh()) < 4e-7
    assert evaluate(2, torch.tensor([0.0, 100.0, -float("inf")])).tolist() == [0.0, 1.0, -1.0]


def test_double_precision_functions() -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.cat((torch.rand(200_000, generator=g).double(), torch.rand(200_000, generator=g).double() * 17))
    near_one = 1.0 - torch.arange(1, 2000).double() * 2.0**-25
    x = torch.cat((x.clamp_min(2.0**-25), near_one, torch.tensor([2.0**-25, 1.0, 17.4]).double()))
    expected = x.log()
    assert float((evaluate(0, x) - expected).abs().div(expected.abs().clamp_min(1e-300)).max()) < 5e-16
    x = torch.linspace(-699.9, 0, 1_000_001, dtype=torch.float64)
    assert worst_relative_error(evaluate(1, x), x.exp()) < 5e-16


def test_limits_of_the_functions() -> None:
    inf, nan = float("inf"), float("nan")
    assert evaluate(0, torch.tensor([0.0, -1.0, -126.0, -inf])).tolist() == [1.0, 0.5, 0.0, 0.0]
    assert evaluate(0, torch.tensor([nan])).isnan().all() and evaluate(1, torch.tensor([nan])).isnan().all()
    assert evaluate(2, torch.tensor([nan])).isnan().all()
    assert evaluate(1, torch.tensor([-1e4, 0.0]))[0] > 0.0
    assert evaluate(1, torch.tensor([0.0, -701.0, -inf], dtype=torch.float64)).tolist() == [1.0, 0.0, 0.0]


def linear_case() -> tuple[torch.Tensor, PackedLinear, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    packed = native.pack_linear(torch.randn(500, 300, generator=g), None, False)
    x = torch.randn(40, 300, generator=g)
    return x, packed, native.linear(x, packed, None)


def test_concurrent_callers_get_right_results() -> None:
    x, packed, expected = linear_case()
    native.set_num_threads(3)
    failures: list[int] = []

    def call(caller: int) -> None:
        for _ in range(200):
            if not torch.equal(native.linear(x, packed, None), expected):
                failures.append(caller)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


def test_thread_count_may_change_at_any_time() -> None:
    x, packed, expected = linear_case()
    for count in (1, 4, 2, 7, 1, 3):
        native.set_num_threads(count)
        assert native.get_num_threads() == count
        for _ in range(20):
            assert torch.equal(native.linear(x, packed, None), expected)
    with pytest.raises(ValueError, match="at least one"):
        native.set_num_threads(0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_its_own_pool() -> None:
    x, packed, expected = linear_case()
    native.set_num_threads(3)
    native.linear(x, packed, None)
    child = os.fork()
    if child == 0:
        same = torch.equal(native.linear(x, packed, None), expected)
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(native.linear(x, packed, None), expected)


def test_every_runnable_library_is_built_and_an_unknown_machine_is_refused() -> None:
    assert library.runnable_isas()
    with pytest.raises(build.CannotBuildError, match="riscv64"):
        build.build(machine="riscv64")
