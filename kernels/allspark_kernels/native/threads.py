"""Number of threads of the native kernels. Results do not depend on it."""

import torch

from . import library


def get_num_threads() -> int:
    """Threads that share the work of one call, the calling one included."""
    count: int = library.current.held.ask_get_threads()
    return count


def set_num_threads(count: int) -> None:
    """Use ``count`` threads from the next call on. Raises ValueError below 1."""
    if count < 1:
        raise ValueError(f"at least one thread is needed, not {count}")
    library.current.freed.ask_set_threads(count)


# Like PyTorch, which honours OMP_NUM_THREADS.
set_num_threads(torch.get_num_threads())
