"""The Node.js producer of examples/node: a program that knows only docs/wire-protocol.md."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fleet.harness import MiniFleet
from tests.fleet.scripted_engine import expected_tokens

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"


@pytest.fixture(scope="module")
def node() -> str:
    """Node.js with the example's packages; `make test` installs them where npm is present."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed here")
    if not (EXAMPLE / "node_modules" / "zeromq").is_dir():
        subprocess.run(
            [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=EXAMPLE, check=True, timeout=300
        )
    return node


@pytest.fixture
async def fleet_(valkey, tmp_path: Path) -> AsyncIterator[MiniFleet]:  # type: ignore[no-untyped-def]
    f = MiniFleet(valkey.url, tmp_path)
    yield f
    await f.close()


async def test_a_node_producer_submits_and_reads_its_stream(node: str, fleet_: MiniFleet) -> None:
    fleet_.write_model()
    fleet_.start_worker()
    await fleet_.build_and_start()
    process = await asyncio.create_subprocess_exec(
        node, "producer.mjs", fleet_.frontend, fleet_.redis, "m", "25", "3", "1", "4",
        cwd=EXAMPLE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    result = json.loads(out)
    assert result["tokens"] == expected_tokens([3, 1, 4], 25)
    assert (result["status"], result["reason"]) == (3, "length")
    rid = f"default/{result['uuid']}"
    assert (await fleet_.streams.view(rid)).outcome == "released"


async def test_a_node_producer_is_told_why_it_is_refused(node: str, fleet_: MiniFleet) -> None:
    process = await asyncio.create_subprocess_exec(
        node, "producer.mjs", fleet_.frontend, fleet_.redis, "nobody", "5", "1",
        cwd=EXAMPLE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode != 0
    assert b"model 'nobody' is unknown" in err
