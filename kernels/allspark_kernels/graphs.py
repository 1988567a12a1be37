"""Graph capture behind one call, so that an engine need not know whether its device has graphs."""

from collections.abc import Callable

import torch

from . import native
from .backend import backend_for

WARM_UPS = 2


def capture(step: Callable[[], None], device: torch.device | str) -> Callable[[], None]:
    """Return a callable that repeats ``step``: a CUDA graph on CUDA, recorded native calls on a CPU.

    ``step`` takes its inputs from, and leaves its outputs in, tensors that outlive it, and must not wait
    for the device. It runs a few times here first: kernels are compiled and allocations settled. Where
    there is neither (PyTorch as the implementation), ``step`` itself is returned.
    """
    where = torch.device(device)
    if where.type == "cpu" and backend_for(where) == "native":
        return native.capture(step)
    if where.type != "cuda":
        return step
    side = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream(where).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
