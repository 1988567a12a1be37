"""A whole fleet on this machine: the embedded store, brokers, gateways and workers as supervised processes.

::

    with Fleet(FleetOptions(workers=2)) as fleet:
        fleet.load_model("smollm2", path)
        with Client(fleet.addresses) as client:
            ...

``async with`` works too. Leaving the block drains everything in order and leaves no process behind; even if
this process is killed, the kernel tells its children to end.
"""

from allspark.launcher.errors import LaunchError
from allspark.launcher.fleet import Fleet
from allspark.launcher.options import FleetOptions
from allspark.launcher.process import ManagedProcess, State

__all__ = ["Fleet", "FleetOptions", "LaunchError", "ManagedProcess", "State"]
