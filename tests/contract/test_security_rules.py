"""Rules that hold for the whole tree: nothing is unpickled, and the documents have what the code has."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from allspark_bus import acl

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "proto",
    "bus",
    "gateway",
    "broker",
    "workers",
    "kernels",
    "client",
    "benchmarks",
    "examples",
    "deploy",
)
FILES = sorted(
    path for part in PARTS for path in (ROOT / part).rglob("*.py") if not path.stem.endswith("_pb2")
)
#: Modules that run code while they read; `shelve` and `joblib` are pickle under another name.
READERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {
    *("torch.load", "torch.jit.load", "torch.package", "torch.hub", "torch.export.load", "yaml.load"),
    *("yaml.unsafe_load", "runpy.run_path", "logging.config.listen"),
}
#: Collectives whose objects travel pickled, and a store that any peer of the network can fill.
COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "TCPStore", "init_process_group", "rpc"),
}
#: What sends Python objects between processes, and so unpickles: only a build tool may, with its children.
PICKLING = {"multiprocessing", "ProcessPoolExecutor", "transformers"}
#: ... and a benchmark that measures transformers may run it, on safetensors.
MAY_PICKLE = {
    "kernels/allspark_kernels/aot.py": {"imports ProcessPoolExecutor"},
    "benchmarks/peer_worker.py": {"imports transformers"},
}


def offences(text: str) -> Iterator[str]:
    """What in a source text could run code out of a file or message."""
    for node in ast.walk(ast.parse(text)):
        yield from _between_processes(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None)
            found = {name.partition(".")[0] for name in [*names, module or ""]} & READERS
            yield from (f"line {node.lineno}: imports {name}" for name in found)
            if module == "torch" and "load" in names:
                yield f"line {node.lineno}: imports torch.load"
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in CALLS or name.endswith((".read_pickle", "_pyobj")):
                yield f"line {node.lineno}: {name}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"line {node.value.lineno}: allow_pickle"
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            yield f"line {node.value.lineno}: trust_remote_code"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        ):
            yield f"line {node.lineno}: {node.func.id}"


def _between_processes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {name for alias in node.names for name in alias.name.split(".")}
        module = set((getattr(node, "module", None) or "").split("."))
        yield from (f"line {node.lineno}: imports {name}" for name in (names | module) & PICKLING)
        if "distributed" in module:
            yield from (f"line {node.lineno}: imports {name}" for name in names & COLLECTIVES)
    elif isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
        yield f"line {node.lineno}: {node.attr}"


def test_the_tree_is_looked_at() -> None:
    assert len(FILES) > 100


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    found = list(offences(path.read_text(encoding="utf-8")))
    allowed = MAY_PICKLE.get(str(path.relative_to(ROOT)), set())
    assert {text.partition(": ")[2] for text in found} == allowed, found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import os, shelve",
        "x = torch.load(f)",
        "from torch import load",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "socket.recv_pyobj()",
        "pd.read_pickle(f)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "eval(text)",
        "dist.broadcast_object_list(x)",
        "from torch.distributed import TCPStore",
        "import multiprocessing",
        "from multiprocessing.connection import Listener",
        "from concurrent.futures import ProcessPoolExecutor",
        "from transformers import AutoModel",
    ],
)
def test_the_rule_finds(text: str) -> None:
    assert len(list(offences(text))) == 1


def test_the_document_has_the_exact_acl() -> None:
    lines = (ROOT / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
    assert acl.user_line("allspark", "SHA256") in lines
    assert acl.reader_line("reader-team-a", "SHA256", "team-a") in lines
