"""The command for the first minutes on a GPU, as far as it can be tried without one."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


session = load("gpu_session")
PRINTS = [
    sys.executable,
    "-c",
    "print('RESULT {\"us\": 2.5, \"runs\": [1.0, 3.0, 2.0]}'); print('3 passed, 1 skipped')",
]


def test_figures_and_test_counts_get_into_the_report(tmp_path: Path) -> None:
    part = session.Part("kernels", [PRINTS], 60)
    session.run(part, tmp_path, 60)
    assert part.problem == "" and part.summary == "3 passed, 1 skipped"
    assert part.results == [{"us": 2.5, "runs": [1.0, 3.0, 2.0]}]
    report = session.markdown([part])
    assert "| us | runs |" in report and "| 2.5 | 2.0 (1.0-3.0) |" in report and "3 passed" in report


def test_a_part_that_fails_hangs_or_lacks_a_package_is_named(tmp_path: Path) -> None:
    failing = session.Part("a", [[sys.executable, "-c", "raise SystemExit(3)"], PRINTS], 60)
    session.run(failing, tmp_path, 60)
    assert failing.problem.startswith("exit status 3 of") and len(failing.results) == 1
    endless = "import threading; print('RESULT {\"us\": 1.5}', flush=True); threading.Event().wait()"
    hanging = session.Part("b", [[sys.executable, "-c", endless], PRINTS], 60)
    session.run(hanging, tmp_path, 5)
    assert hanging.problem.startswith("cut off after 5 s"), "and what came before is kept"
    assert hanging.results in ([{"us": 1.5}], [])
    lacking = session.Part("c", [PRINTS], 60, ("no_such_package", "json"))
    session.run(lacking, tmp_path, 60)
    assert lacking.problem == "not run: needs no_such_package" and not lacking.results
    assert "needs no_such_package" in session.markdown([failing, hanging, lacking])


def test_a_part_whose_tests_were_all_skipped_has_failed() -> None:
    part = session.Part("kernel-tests", [], 60)
    session.read_output(part, "$ python -m pytest\n285 skipped, 6 warnings in 46.10s\n")
    assert part.problem == "no test ran"
    part = session.Part("kernel-tests", [], 60)
    session.read_output(part, "===== 1 failed, 3 passed in 2.00s =====\n")
    assert (part.problem, part.summary) == ("", "1 failed, 3 passed in 2.00s")


def test_every_command_of_the_session_names_what_exists(tmp_path: Path) -> None:
    parts = session.parts_of(tmp_path)
    assert sum(part.limit for part in parts if part.name != "large") <= 900
    for part in parts:
        for command in part.commands:
            files = [word for word in command if word.startswith(("tests/", "benchmarks/"))]
            assert all((session.ROOT / file).exists() for file in files)
            assert files or command[1] == "-c" or importlib.util.find_spec(command[2]) is not None


def test_rows_of_the_comparison_say_whose_they_are() -> None:
    part = session.Part("small", [], 60)
    row = json.dumps({"decode_tok_s": [5.0]})
    command = "$ python benchmarks/peer_worker.py transformers m --device cuda:0 --at-once 16"
    session.read_output(part, f"{command}\nLoading\nRESULT {row}\n")
    assert part.results == [{"row": "transformers", "at_once": 16, "decode_tok_s": [5.0]}]


def test_without_a_gpu_it_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "--out", str(tmp_path / "out")])
    assert session.main() == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_the_random_model_has_the_tensors_that_its_configuration_promises(tmp_path: Path) -> None:
    from allspark_workers.engine.types import ModelConfig
    from allspark_workers.models.loader import load_model

    path = load("random_model").make("tiny", tmp_path / "model", "cpu")
    model = load_model(ModelConfig(str(path), max_length=64))
    assert model.arch.num_layers == 2 and model.dtype == torch.bfloat16
