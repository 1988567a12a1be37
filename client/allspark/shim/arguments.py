"""The command line with which DashInfer's client starts mpirun."""

from collections.abc import Sequence
from typing import NamedTuple

from allspark.shim.settings import ShimError

DAEMON = "allspark_daemon"
SOCKET = "/tmp/allspark.pid_{pid}_rank_{rank}"  # where the client looks; it cannot be told otherwise


class Launch(NamedTuple):
    """The client's process id, and the ranks that it expects."""

    client_pid: int
    ranks: tuple[int, ...]

    def sockets(self) -> dict[int, str]:
        """Path of the socket of each rank."""
        return {rank: SOCKET.format(pid=self.client_pid, rank=rank) for rank in self.ranks}


def parse(argv: Sequence[str]) -> Launch:
    """``… numactl -m 0 -N 0 DIR/allspark_daemon PID RANK`` for each rank, joined by ``:``.

    Raises ``ShimError`` for anything else.
    """
    found: list[tuple[int, int]] = []
    for i, word in enumerate(argv):
        if word.rpartition("/")[2] == DAEMON:
            pid_and_rank = argv[i + 1 : i + 3]
            if len(pid_and_rank) != 2 or not all(text.isdigit() for text in pid_and_rank):
                break
            found.append((int(pid_and_rank[0]), int(pid_and_rank[1])))
    pids, ranks = {pid for pid, _ in found}, tuple(rank for _, rank in found)
    if len(pids) != 1 or 0 in pids or 0 not in ranks or len(set(ranks)) != len(ranks):
        raise ShimError(
            f"not the way in which DashInfer 1.x starts its daemon: mpirun {' '.join(argv)}\n"
            "This directory is for the AS_DAEMON_PATH of a DashInfer program, not to be run by hand."
        )
    return Launch(pids.pop(), ranks)
