"""Who may import whom: the contracts in pyproject.toml hold, and they cover every package."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(tool)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_contracts_cover_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    linted = project["tool"]["importlinter"]["root_packages"]
    on_disk = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/*/py.typed")}
    assert set(wheel) == on_disk
    assert {Path(package).name for package in wheel} == set(linted)
    assert {str(Path(package).parent) for package in wheel} == set(
        project["tool"]["hatch"]["build"]["dev-mode-dirs"]
    )
