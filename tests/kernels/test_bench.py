"""What `python -m allspark_kernels.triton_ops.bench` measures, in tiny shapes in the interpreter."""

import math

import pytest
import torch
from allspark_kernels.triton_ops.bench import TINY, Case, Result, all_cases, main, result_of
from kernel_helpers import Place


def test_every_case_runs_and_computes_what_its_reference_does(place: Place) -> None:
    if place.name == "torch":
        pytest.skip("compares kernels with PyTorch")
    names = set()
    with torch.inference_mode():
        for case in all_cases(TINY, torch.device(place.device)):
            names.add(case.name.split()[0])
            ours, reference = case.ours(), case.reference() if case.reference else None
            assert isinstance(ours, torch.Tensor) and isinstance(reference, torch.Tensor)
            assert ours.numel() == reference.numel(), case.name
            assert case.num_bytes > 0
            if case.name.startswith(("linear ", "silu_mul", "add_rms_norm")) and "add" not in case.name:
                assert torch.allclose(ours.float(), reference.float(), atol=1e-3), case.name
    assert names == {
        *("linear", "linear_int8", "linear_int4", "decode", "prefill"),
        *("add_rms_norm", "silu_mul", "sample", "experts"),
    }


def test_figures_follow_from_the_times() -> None:
    case = Case("x", lambda: "ours", lambda: "reference", num_bytes=2_000_000, flops=3_000_000_000)
    result = result_of(case, lambda run: {"ours": 2e-6, "reference": 5e-6}[str(run())])
    assert result == Result("x", 2.0, 5.0, 2.5, 1000.0, 1500.0)


def test_a_case_that_fails_is_reported_and_the_next_one_measured() -> None:
    def broken() -> None:
        raise RuntimeError("out of resources")

    result = result_of(Case("x", broken, None), lambda run: run() or math.inf)
    assert result == Result("x", problem="RuntimeError: out of resources")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        main([])
    assert "no CUDA device" in capsys.readouterr().err
