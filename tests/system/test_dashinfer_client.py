"""DashInfer 1.3.0's own client, unmodified, against the shim; the wheel has an environment of its own."""

import asyncio
import fcntl
import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from allspark.client import Client, GenerateOptions
from allspark.demo_model import cache_dir
from allspark.launcher import Fleet
from allspark.shim import ShimSettings, write_directory
from allspark.shim.settings import Target

from tests.system.test_dashinfer_shim import owned_by_clients

PROGRAM = Path(__file__).with_name("dashinfer_program.py")
WHEELS = ("dashinfer==1.3.0", "protobuf==3.18.3")
PROMPTS = ([11, 12, 13], [21, 22], [31, 32, 33, 34])
NEW = 24
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def dash_python() -> Path:
    """Python of an environment with the wheel; made once, torch comes from this environment."""
    here = (platform.python_implementation(), sys.version_info[:2], platform.machine(), sys.platform)
    if here != ("CPython", (3, 11), "x86_64", "linux"):
        pytest.skip("dashinfer 1.3.0 has wheels for CPython 3.11 on x86-64 Linux only")
    directory = cache_dir() / "test-dashinfer-1.3.0"
    directory.parent.mkdir(parents=True, exist_ok=True)
    python = directory / "bin" / "python"
    with (directory.parent / "test-dashinfer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "complete").exists():
            _make(directory, python)
    return python


def _make(directory: Path, python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", directory], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    unpinned = os.environ | {"PIP_CONSTRAINT": ""}
    done = subprocess.run(
        [*pip, "--quiet", "--no-deps", "--only-binary=:all:", *WHEELS],
        capture_output=True, text=True, check=False, env=unpinned,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"the wheel of dashinfer 1.3.0 cannot be had: {done.stderr.strip()[-300:]}")
    packages = sysconfig.get_paths(vars={"base": str(directory), "platbase": str(directory)})["purelib"]
    (Path(packages) / "zz_torch.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (directory / "complete").touch()


def start(python: Path, shim: Path, prompt: list[int], fate: str) -> "subprocess.Popen[str]":
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environ |= {"AS_DAEMON_PATH": str(shim), "AS_NUMA_NUM": "1", "AS_NUMA_OFFSET": "0"}
    return subprocess.Popen(
        [python, PROGRAM, "their-name", str(NEW), fate, *map(str, prompt)],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_four_programs_at_once_one_of_which_is_killed(
    scripted_fleet: Fleet, dash_python: Path, tmp_path: Path
) -> None:
    settings = ShimSettings(tuple(scripted_fleet.addresses[:1]), {"*": Target("m")})
    shim = write_directory(tmp_path, settings).parent
    programs = [start(dash_python, shim, prompt, "finish") for prompt in PROMPTS]
    victim = start(dash_python, shim, [41], "wait")
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "holding 3\n", victim.communicate()
        for program, prompt in zip(programs, PROMPTS, strict=True):
            out, err = program.communicate(timeout=TIMEOUT_S)
            assert program.returncode == 0, err
            with Client(scripted_fleet.addresses[:1]) as client:
                own = client.submit("m", prompt, GenerateOptions(max_new_tokens=NEW, seed=1))
                assert json.loads(out.splitlines()[-1]) == [own.result()] * 2
                own.release()
        assert len(asyncio.run(owned_by_clients(scripted_fleet))) == 3, "the victim's"
    finally:
        for program in (*programs, victim):
            program.kill()
            program.wait()
    asyncio.run(_until_released(scripted_fleet))


async def _until_released(fleet: Fleet) -> None:
    """The shim of a killed program notices by itself."""
    async with asyncio.timeout(20):
        while await owned_by_clients(fleet):
            await asyncio.sleep(0.05)  # polling for another process
