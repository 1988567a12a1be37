"""Low-rank adapters of the rows of a step."""

import torch

from ..lora import LoraPlan, LoraSite
from . import library
from .elementwise import _need_float32
from .weights import DTYPE_CODES, LONG_CALL_FLOPS


def lora_add(x: torch.Tensor, site: LoraSite, plan: LoraPlan, out: torch.Tensor) -> None:
    """Rows of x [T, K] float32 go through their adapter and are added to their rows of out [T, N] float32."""
    _need_float32(x, out)
    num_rows, rank = plan.rows.shape[0], site.max_rank
    if rank == 0:
        return
    flops = 2 * num_rows * rank * (site.in_features + site.out_features)
    lib = library.current
    calls = lib.freed if flops >= LONG_CALL_FLOPS else lib.held
    if calls.ask_lora_add(
        site.entries.data_ptr(),
        plan.rows.data_ptr(),
        num_rows,
        plan.tiles.data_ptr(),
        plan.tiles.shape[0],
        x.data_ptr(),
        out.data_ptr(),
        site.in_features,
        site.width_list.data_ptr(),
        rank,
        DTYPE_CODES[site.dtype],
    ):
        raise MemoryError(f"no memory for {num_rows} rows of adapters of rank {rank}")
