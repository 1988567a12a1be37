"""Adapters on a rank that follows: it reads its part of the files while rank 0 reads its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from allspark_kernels import LoraTable

from allspark_workers.engine.adapted import AdaptedLinears
from allspark_workers.engine.batch import RaggedBatch
from allspark_workers.engine.device import use_device
from allspark_workers.engine.errors import GroupError
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.loader import Model
from allspark_workers.models.lora_files import AdapterReader, AdapterWeights, find_adapter
from allspark_workers.models.lora_sites import adapter_sites
from allspark_workers.models.ops import DIRECT, KernelOps


class FollowedAdapters:
    """The slots of this rank, filled and emptied as rank 0 says."""

    def __init__(self, config: ModelConfig, model: Model) -> None:
        self._config = config
        self._model = model
        self._sites = [site for site, _ in adapter_sites(model.decoder, model.whole, model.shard)]
        self._loading: dict[str, Future[AdapterWeights]] = {}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._table: LoraTable | None = None
        self._linears: AdaptedLinears | None = None
        if config.lora_max_num:
            shapes = [(site.in_features, site.widths) for site in self._sites]
            self._table = LoraTable(shapes, config.lora_max_num, model.dtype, model.device)
            self._linears = AdaptedLinears(model.decoder, self._table)

    def obey(self, message: dict[str, Any]) -> bool:
        """Do what a message says about adapters; False if it is about something else."""
        if "prepare_adapter" in message:
            name = message["prepare_adapter"]
            self._loading[name] = self._executor.submit(self._load, name)
        elif "drop_adapter" in message:
            self._loading.pop(message["drop_adapter"]).cancel()
        elif "install_adapter" in message:
            self._install(*message["install_adapter"])
        elif "clear_adapter" in message:
            self._slots().clear(message["clear_adapter"])
        else:
            return False
        return True

    def ops(self, batch: RaggedBatch, slots: list[int]) -> KernelOps:
        """The operations of a step whose rows have these slots; empty: no row has an adapter."""
        if not slots or self._linears is None:
            return DIRECT
        return self._linears.ops(DIRECT, slots, batch.q_lens, np.asarray(batch.last))

    def _slots(self) -> LoraTable:
        if self._table is None:
            raise GroupError("rank 0 uses adapters, this rank has no place for any")
        return self._table

    def _load(self, name: str) -> AdapterWeights:
        roots = [Path(root) for root in self._config.lora_roots]
        with use_device(self._model.device):
            reader = AdapterReader(find_adapter(name, roots), self._sites, self._config.lora_max_rank)
            return reader.load(self._model.dtype, self._model.device)

    def _install(self, name: str, slot: int, digest: str) -> None:
        weights = self._loading.pop(name).result()
        if weights.digest != digest:
            raise GroupError(f"the files of adapter {name!r} changed while the ranks were reading them")
        self._slots().put(slot, weights.sites)
