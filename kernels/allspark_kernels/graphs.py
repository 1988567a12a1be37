"""Graph capture behind one call, so that an engine need not know whether its device has graphs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import native
from .backend import backend_for

WARM_UPS = 2

# PyTorch captures one graph at a time in a process.
_capturing = threading.Lock()


@contextmanager
def no_capture() -> Iterator[None]:
    """Inside the block no other thread captures a graph; for what PyTorch refuses meanwhile.

    That is emptying its cache of device memory, and waiting for a whole device instead of a stream.
    """
    with _capturing:
        yield


class GraphPool:
    """Captured steps of one device that run one after the other, never at the same time.

    On CUDA the memory of their intermediate results is shared: a result stays valid until another step of
    the pool is repeated. Capture the one that needs most first.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            # Blocks freed on one stream serve only that stream: so all captures of the pool take this one.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._handle = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a callable that repeats ``step``: a CUDA graph on CUDA, recorded native calls on a CPU.

        ``step`` takes its inputs from, and leaves its outputs in, tensors that outlive it, and must not wait
        for the device. It runs a few times here first: kernels are compiled and allocations settled. Where
        there is neither (PyTorch as the implementation), ``step`` itself is returned.
        """
        device, stream = self._device, self._stream
        if device.type == "cpu" and backend_for(device) == "native":
            return native.capture(step)
        if stream is None:
            return step
        with _capturing, torch.cuda.device(device):
            current = torch.cuda.current_stream(device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    step()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # "thread_local": engines of other models go on allocating and copying on their own threads.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._handle, stream=stream, capture_error_mode=mode):
                step()
            return graph.replay


def capture(step: Callable[[], None], device: torch.device | str) -> Callable[[], None]:
    """``GraphPool.capture`` of a step that shares its memory with no other."""
    return GraphPool(device).capture(step)
