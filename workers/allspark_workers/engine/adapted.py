"""The operations of a forward pass whose linear layers also apply each row's adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from allspark_kernels import LoraPlan, LoraSite, LoraTable, PackedLinear, plan_lora
from numpy.typing import NDArray

from allspark_workers.models.decoder import Decoder
from allspark_workers.models.lora_sites import adapter_sites
from allspark_workers.models.ops import KernelOps


class AdaptedLinears:
    """Finds the adapters of a packed layer by the layer itself: the forward pass need not know of them."""

    def __init__(self, decoder: Decoder, table: LoraTable) -> None:
        self._device = table.device
        self._packed = [packed for _, packed in adapter_sites(decoder)]
        # An id is unique while its object lives, and these do.
        self._sites: dict[int, LoraSite] = {
            id(packed): site for packed, site in zip(self._packed, table.sites, strict=True)
        }

    def ops(
        self, ops: KernelOps, slots: list[int], counts: NDArray[np.int64], last: NDArray[np.int64]
    ) -> KernelOps:
        """`ops` for a step of rows with `slots` and token `counts`; its tokens `last` [R] go on."""
        whole = plan_lora(slots, counts, self._device)
        num_tokens, ends = int(counts.sum()), whole
        if len(last) != num_tokens:
            of_last = np.repeat(np.asarray(slots, np.int64), counts)[last]
            ends = plan_lora(of_last, np.ones_like(of_last), self._device)
        return replace(ops, linear=self._linear(ops, num_tokens, (whole, ends)))

    def _linear(
        self, ops: KernelOps, num_tokens: int, plans: tuple[LoraPlan | None, LoraPlan | None]
    ) -> Callable[[torch.Tensor, PackedLinear], torch.Tensor]:
        sites, (whole, ends) = self._sites, plans

        def linear(x: torch.Tensor, w: PackedLinear) -> torch.Tensor:
            out = ops.linear(x, w)
            site = sites.get(id(w))
            plan = whole if x.shape[0] == num_tokens else ends
            if site is not None and plan is not None:
                ops.lora_add(x, site, plan, out)
            return out

        return linear
