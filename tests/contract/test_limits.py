"""The house limits: a file 500 lines, a function 60, 7 parameters (kernels exempt from the last)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "proto",
    "bus",
    "gateway",
    "broker",
    "workers",
    "kernels",
    "client",
    "tests",
    "benchmarks",
    "examples",
)
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 500, 60, 7
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "_pb2" not in path.name and "__pycache__" not in path.parts)


def functions(path: Path) -> list[Function]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def num_parameters(function: Function) -> int:
    arguments = function.args
    named = [arg.arg for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return sum(name not in ("self", "cls") for name in named)


def num_body_lines(function: Function) -> int:
    """Lines from the first statement after the docstring to the end."""
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_there_is_something_to_check() -> None:
    assert len(python_files()) > 50


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_limits(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE
    is_kernel_or_test = path.relative_to(ROOT).parts[0] in ("kernels", "tests")
    for function in functions(path):
        where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        if not any("jit" in ast.dump(decorator) for decorator in function.decorator_list):
            assert num_body_lines(function) <= MAX_FUNCTION, where
        if not is_kernel_or_test:
            assert num_parameters(function) <= MAX_PARAMETERS, where
