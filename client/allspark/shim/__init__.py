"""Stands in for DashInfer's daemon, so that programs of DashInfer 1.x run on a fleet unchanged.

DashInfer's ClientEngine starts ``$AS_DAEMON_PATH/mpirun`` and then talks to unix sockets named after its own
process. ``write_directory`` makes a directory whose ``mpirun`` starts ``allspark.shim.main``: one small
process for each client, which forwards to a gateway and goes with its client.
"""

from allspark.shim.directory import write_directory
from allspark.shim.settings import ShimError, ShimSettings

__all__ = ["ShimError", "ShimSettings", "write_directory"]
