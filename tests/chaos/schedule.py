"""What goes wrong: a pure function of a seed, so that a run can be repeated."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.network.proxy import FAULTS

#: The consequences of a fault are over so long after it; of a cut, when connections that it left half open
#: have been noticed. A fault that strikes alone waits for that.
SETTLE_S, CUT_SETTLE_S = 3.0, 5.0
ALONE_EVERY = 4  # of the kills of a worker, from the first
#: How often each fault is chosen. A kill is SIGKILL, a pause SIGSTOP and SIGCONT, an upgrade SIGTERM and then
#: a successor, a cut one of `proxy.FAULTS` in the network between two processes.
WEIGHTS = {
    ("worker", "kill"): 5,
    ("worker", "pause"): 2,
    ("worker", "upgrade"): 2,
    ("broker", "kill"): 3,
    ("broker", "pause"): 1,
    ("broker", "upgrade"): 1,
    ("gateway", "kill"): 3,
    ("gateway", "pause"): 1,
    ("gateway", "upgrade"): 1,
    ("store", "kill"): 1,
    ("store", "pause"): 1,
    ("worker-broker", "cut"): 2,
    ("worker-store", "cut"): 2,
    ("gateway-broker", "cut"): 1,
    ("gateway-store", "cut"): 1,
    ("broker-store", "cut"): 2,
    ("client-gateway", "cut"): 1,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`delay_s` after the last one `target` (an index into its kind) is hit; a pause or cut lasts `pause_s`.

    `way` is the name of what happens to the network. One that strikes `alone` waits until all earlier ones
    are over, and later ones wait for it.
    """

    delay_s: float
    kind: str
    action: str
    target: int
    pause_s: float = 0.0
    way: str = ""
    alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.action}"

    @property
    def settle_s(self) -> float:
        """How long its consequences outlast it."""
        return CUT_SETTLE_S if self.action == "cut" else SETTLE_S

    @property
    def details(self) -> str:
        """For people."""
        way = f" ({self.way})" if self.way else ""
        return f"{self.name}{way} {self.target}" + (f" for {self.pause_s:.1f} s" if self.pause_s else "")


def plan(seed: int, count: int, sizes: Mapping[str, int], longest_pause_s: float) -> list[Fault]:
    """The faults of a seed. The first ones are one of each kind, in an order that depends on the seed."""
    rng = random.Random(seed)
    names = list(WEIGHTS)
    first = rng.sample(names, len(names))
    chosen = first[:count] + rng.choices(names, list(WEIGHTS.values()), k=max(0, count - len(first)))
    faults = [
        Fault(
            rng.uniform(0.1, 1.0),
            kind,
            action,
            rng.randrange(sizes[kind]),
            # Most are short; some are longer than it takes until a silent process counts as dead.
            0.2 + (longest_pause_s - 0.2) * rng.random() ** 2 if action in ("pause", "cut") else 0.0,
            rng.choice(list(FAULTS)) if action == "cut" else "",
        )
        for kind, action in chosen
    ]
    kills = [i for i, fault in enumerate(faults) if fault.name == "worker kill"]
    for i in kills[::ALONE_EVERY]:
        faults[i] = replace(faults[i], alone=True)
    return faults
