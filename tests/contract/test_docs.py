"""The documents name only what exists."""

import re
from pathlib import Path

import pytest
from allspark.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
DOCUMENTS = [path for path in DOCUMENTS if "node_modules" not in path.parts]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith(("http://", "https://")):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    for command in re.findall(r"^(?:\$ )?allspark ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        assert command in COMMANDS, f"{path.name} mentions allspark {command}"


def test_readme_has_the_two_commands_and_the_makefile_has_them_too() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"\nmake {target} " in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_architecture_stays_short() -> None:
    lines = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
