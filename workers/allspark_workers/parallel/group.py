"""What the ranks of a model exchange within a step: sums of partial results, and the parts of the logits.

Sums are taken in the order of the ranks from what each of them has: an all-reduce adds in an order that
depends on where a number lies in the buffer, and a token's bits would depend on its neighbours in the batch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from allspark_workers.engine.errors import GroupError
from allspark_workers.models.shards import Shard

LOOPBACK = "127.0.0.1"
# All ranks enter a step at once, so this bounds how long the slowest may compute between two exchanges.
EXCHANGE_TIMEOUT = timedelta(minutes=10)


class Meeting:
    """A file through which the ranks of a model find each other, in a directory of this user alone.

    Not PyTorch's TCPStore: it listens on every interface of the machine and does whatever a peer asks.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="allspark-ranks-")
        self.path = os.path.join(self._directory.name, "store")  # noqa: PTH118 (PyTorch takes text)

    def close(self) -> None:
        """Removes it; the ranks must have met, or have ended."""
        self._directory.cleanup()


def open_store(path: str, size: int) -> Store:
    """The store of a meeting, for each of the `size` ranks."""
    return FileStore(path, size)


class Group:
    """The ranks of one model, seen from one of them; all make the same calls in the same order."""

    def __init__(self, store: Store, shard: Shard, device: torch.device) -> None:
        """Blocks until all ranks have come. Raises GroupError if they do not."""
        self.shard = shard
        try:
            self._ranks = _connect(store, shard, device)
        except RuntimeError as error:
            raise GroupError(f"rank {shard.rank} of {shard.size} cannot reach the others: {error}") from error

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x [T, H], the same bits on all of them."""
        parts = self._gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def join_columns(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """[R, width] from every rank's columns, which are cut as `Shard.part(width)` says."""
        widths = self.shard.widths(width)
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1]))
        parts = self._gather(padded)
        return torch.cat([part[:, :count] for part, count in zip(parts, widths, strict=True)], 1)

    def _gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        try:
            self._ranks.allgather([parts], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise GroupError(f"a rank of this model's {self.shard.size} is gone: {error}") from error
        return parts


def _connect(store: Store, shard: Shard, device: torch.device) -> Any:
    """A process group of its own, beside any others of this process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # All ranks are on this machine; NCCL would listen on its first network interface.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        limits = dist.ProcessGroupNCCL.Options()
        limits._timeout = EXCHANGE_TIMEOUT
        return dist.ProcessGroupNCCL(store, shard.rank, shard.size, limits)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = EXCHANGE_TIMEOUT
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, options)
