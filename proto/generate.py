"""Regenerates the code in allspark_proto/ from the .proto files beside this script (`make proto`).

With --check it writes nothing and exits 1 if the checked-in code differs.
"""

import filecmp
import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent
PACKAGE = "allspark_proto"


def generate(out: Path) -> None:
    """Writes *_pb2.py, *_pb2_grpc.py and their stubs below `out`/allspark_proto."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    common = ["protoc", f"-I{PACKAGE}={HERE}", f"--python_out={out}", f"--mypy_out=quiet:{out}"]
    service = [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"]
    for name, extra in (("allspark_service.proto", service), ("dashinfer_v1.proto", []), ("fleet.proto", [])):
        if protoc.main([*common, *extra, f"{PACKAGE}/{name}"]) != 0:
            raise SystemExit(f"protoc failed on {name}")


def drift() -> list[str]:
    """Names of checked-in generated files that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = sorted((Path(tmp) / PACKAGE).iterdir())
        return [f.name for f in fresh if not _same(f, HERE / PACKAGE / f.name)]


def _same(a: Path, b: Path) -> bool:
    return b.exists() and filecmp.cmp(a, b, shallow=False)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if names := drift():
            raise SystemExit(f"generated code is stale, run `make proto`: {', '.join(names)}")
    else:
        generate(HERE)
