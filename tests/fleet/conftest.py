"""Servers of Redis, other than a single one, that a fleet is tested on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.topologies import ClusterNodes, Replicated


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Replicated]:
    with Replicated(tmp_path / "servers", replicas=1) as found:
        yield found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[ClusterNodes]:
    with ClusterNodes(tmp_path / "servers", masters=3) as found:
        yield found
