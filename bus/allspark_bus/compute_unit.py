"""What a model asks for (`compute_unit`: CPU:0, CUDA:0,1) and what a worker has (`device`: cpu, cuda:0,1).

The ids of a compute unit are not those of a certain machine: in a fleet they say how many devices the model
is spread over (tensor parallelism, a rank for each).
"""

import re
from dataclasses import dataclass

from allspark_bus.errors import ParamError

MAX_RANKS = 16
_UNIT = re.compile(r"(CPU|CUDA):([0-9]{1,6}(?:,[0-9]{1,6})*)\Z")


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """`kind` "cpu", "cuda" or "" (any), over `size` devices."""

    kind: str
    size: int

    def fits(self, device: str) -> bool:
        """Whether a worker with these devices can run the model; CPU ranks share the cores of one."""
        return device.startswith(self.kind) and (device == "cpu" or self.size <= len(devices_of(device)))

    def devices(self, device: str) -> tuple[str, ...]:
        """The device of each rank, on a worker that fits."""
        return ("cpu",) * self.size if device == "cpu" else devices_of(device)[: self.size]


def parse_unit(text: str) -> ComputeUnit:
    """Raises ParamError for text that is no compute unit; empty text means any one device."""
    if not text:
        return ComputeUnit("", 1)
    match = _UNIT.match(text)
    if match is None:
        raise ParamError(f"compute_unit {text!r} is not CPU:<ids> or CUDA:<ids>, as in CUDA:0 or CUDA:0,1")
    ids = match[2].split(",")
    if len(set(map(int, ids))) != len(ids):
        raise ParamError(f"compute_unit {text!r} names a device twice")
    if len(ids) > MAX_RANKS:
        raise ParamError(f"compute_unit {text!r} names {len(ids)} devices, the limit is {MAX_RANKS}")
    return ComputeUnit(match[1].lower(), len(ids))


def devices_of(device: str) -> tuple[str, ...]:
    """ "cuda:0,1" -> cuda:0, cuda:1; "cpu" -> cpu."""
    kind, _, ids = device.partition(":")
    return tuple(f"{kind}:{index}" for index in ids.split(",")) if ids else (kind,)
