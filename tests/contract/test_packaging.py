"""The constraints pin everything that the project installs, and the environment is made of exactly that."""

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {"pip", "setuptools", "allspark-fleet"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in found}


def project() -> dict[str, dict[str, list[str]]]:
    loaded: dict[str, dict[str, list[str]]] = tomllib.loads(
        (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    return loaded


def declared() -> list[Requirement]:
    table = project()["project"]
    extras: dict[str, list[str]] = table["optional-dependencies"]  # type: ignore[assignment]
    texts = [*table["dependencies"], *(text for extra in extras.values() for text in extra)]
    requirements = [Requirement(text) for text in [*texts, *project()["build-system"]["requires"]]]
    return [requirement for requirement in requirements if requirement.name != "allspark-fleet"]


def closure(requirements: list[Requirement]) -> Iterator[str]:
    """Names of everything that these requirements bring into this environment."""
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, extra) for requirement in requirements for extra in [*requirement.extras, ""]]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen or name in NOT_OURS:
            continue
        seen.add((name, extra))
        yield name
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of the build environment only
        for text in needed:
            further = Requirement(text)
            if further.marker is None or further.marker.evaluate({"extra": extra}):
                todo += [(further, inner) for inner in [*further.extras, ""]]


def test_everything_that_gets_installed_is_pinned() -> None:
    missing = set(closure(declared())) - set(pins())
    assert not missing, f"add to constraints.txt: {sorted(missing)}"


def test_pins_satisfy_what_the_project_asks_for() -> None:
    for requirement in declared():
        pinned = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned, prereleases=True), (
            f"{requirement} but {pinned} is pinned"
        )


def test_environment_is_the_pinned_one() -> None:
    pinned = pins()
    for name in set(closure(declared())):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        assert Version(installed).public == Version(pinned[name]).public, name


def test_every_dependency_says_what_it_is_for() -> None:
    """A reader of pyproject.toml can tell why a package is there."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    start = lines.index("dependencies = [")
    block = lines[start + 1 : lines.index("]", start)]
    assert block and all("#" in line for line in block)
