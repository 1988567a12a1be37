"""Build hook: compile the native CPU kernels into the package, for wheels and for editable installs.

Where they cannot be compiled the build goes on without them; PyTorch then serves the CPU, and says so.
A wheel also records the commit it was built from, for GetVersionFull.
"""

import importlib.util
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "kernels/allspark_kernels/native"
VERSION = "proto/allspark_proto/version.py"


class NativeKernelsHook(BuildHookInterface):  # type: ignore[misc]
    """Adds one shared library per instruction set and tags the wheel with the platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in place (editable installs import from there) and list the results for a wheel."""
        root = Path(self.root)
        if version != "editable":  # an editable install reads the checkout's HEAD itself
            _record_commit(root, build_data["force_include"])
        recipe = _load(root / NATIVE / "build.py")
        try:
            libraries = recipe.build()
        except recipe.CannotBuildError as error:
            self.app.display_warning(f"building without native CPU kernels: {error}")
            return
        if version != "editable":
            for path in libraries:
                build_data["force_include"][str(path)] = f"allspark_kernels/native/{path.name}"
        build_data["pure_python"] = False
        glibc = recipe.GLIBC.replace(".", "_")
        build_data["tag"] = f"py3-none-manylinux_{glibc}_{platform.machine()}"


def _record_commit(root: Path, force_include: dict[str, str]) -> None:
    """Add the commit's digest to the wheel; a source tree without .git records none."""
    version = _load(root / VERSION)
    if sha := version.read_head(root / ".git"):
        recorded = root / "build" / version.SHA_FILE
        recorded.parent.mkdir(exist_ok=True)
        recorded.write_text(sha + "\n", encoding="ascii")
        force_include[str(recorded)] = f"allspark_proto/{version.SHA_FILE}"


def _load(path: Path) -> ModuleType:
    """Import one file alone; its package may need what a build environment does not have."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing from the source tree; unpack it again")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
