"""Rank 0's hold on the processes of the other ranks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import torch

from allspark_workers.engine import errors
from allspark_workers.engine.batch import RaggedBatch
from allspark_workers.engine.embeddings import GivenEmbeddings
from allspark_workers.engine.errors import EngineError, GroupError
from allspark_workers.engine.threads import usable_cores
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.shards import Shard
from allspark_workers.parallel import messages
from allspark_workers.parallel.group import Group, Meeting, open_store

log = logging.getLogger(__name__)

_ENTRY = (sys.executable, "-m", "allspark_workers.parallel.follower")


class Leader:
    """Starts one process for each rank but 0, tells them what to do, and ends them with itself.

    A process that ends unasked is told to `on_death`, on a thread of its own; from then on every method
    raises GroupError.
    """

    def __init__(self, config: ModelConfig, on_death: Callable[[str], None] | None = None) -> None:
        """Blocks until all ranks are connected. Raises GroupError if one cannot be started."""
        size = len(config.devices)
        self.shard = Shard(0, size)
        self.config = rank_config(config, 0)
        self._on_death = on_death
        self._dead = ""
        self._is_closing = False
        self._meeting = Meeting()
        self._processes = [self._spawn(config, rank) for rank in range(1, size)]
        for process in self._processes:
            self._answer(process)
        self.group = Group(open_store(self._meeting.path, size), self.shard, torch.device(self.config.device))
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True
            ).start()

    def _spawn(self, config: ModelConfig, rank: int) -> subprocess.Popen[bytes]:
        mine = rank_config(config, rank)
        process = subprocess.Popen(
            [*_ENTRY, str(rank), str(self.shard.size), self._meeting.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(mine.num_threads or 1)},
        )
        self._send(process, {"config": json.dumps(asdict(mine))})
        return process

    def wait_loaded(self) -> None:
        """Blocks until every rank has its weights. Raises what a rank raised."""
        for process in self._processes:
            self._answer(process)

    def allocate(self, num_spans: int) -> None:
        """Every other rank allocates its part of the KV cache. Raises ModelMemoryError if one cannot."""
        self._tell({"allocate": num_spans})
        for process in self._processes:
            self._answer(process)

    def free(self) -> None:
        """Every other rank frees its KV cache."""
        self._tell({"free": True})

    def step(self, batch: RaggedBatch, given: GivenEmbeddings, adapters: list[int]) -> None:
        """Every other rank computes this step up to its part of the logits.

        `adapters`: the slot of each row, empty if no row has an adapter.
        """
        packed = messages.pack_batch(batch)
        self._tell({"step": packed, "given": messages.pack_given(given), "adapters": adapters})

    def infer(self, batch: RaggedBatch, given: GivenEmbeddings, adapters: list[int]) -> None:
        """Every other rank computes this step of ModelInference."""
        packed = messages.pack_batch(batch)
        self._tell({"infer": packed, "given": messages.pack_given(given), "adapters": adapters})

    def prepare_adapter(self, name: str) -> None:
        """Every other rank begins to read its part of an adapter."""
        self._tell({"prepare_adapter": name})

    def drop_adapter(self, name: str) -> None:
        """Every other rank forgets what it has read: it is not needed."""
        self._tell({"drop_adapter": name})

    def install_adapter(self, name: str, slot: int, digest: str) -> None:
        """Every other rank puts what it has read into a slot before the next step."""
        self._tell({"install_adapter": [name, slot, digest]})

    def clear_adapter(self, slot: int) -> None:
        """Every other rank empties a slot."""
        self._tell({"clear_adapter": slot})

    def copy_spans(self, copies: Mapping[int, int]) -> None:
        """Every other rank gives each span (key) the content of another one (value)."""
        if copies:
            self._tell({"copy": list(copies.items())})

    def check(self) -> None:
        """Raises GroupError if a rank is gone."""
        if self._dead:
            raise GroupError(self._dead)

    def close(self) -> None:
        """Ends the other ranks and waits for them."""
        self._is_closing = True
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._meeting.close()

    def _tell(self, message: dict[str, object]) -> None:
        self.check()
        for process in self._processes:
            self._send(process, message)

    def _send(self, process: subprocess.Popen[bytes], message: dict[str, object]) -> None:
        if process.stdin is None:
            raise GroupError("a rank has no standard input")
        try:
            messages.write(process.stdin, message)
        except OSError as error:
            raise GroupError(f"a rank is gone: {error}") from error

    def _answer(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for what the rank says to the last thing that it was told. Raises its error."""
        answer = None if process.stdout is None else messages.read(process.stdout)
        if answer is None:
            raise GroupError(f"a rank ended with status {process.wait()} while the model was being prepared")
        if "error" in answer:
            kind = getattr(errors, answer["error"], EngineError)
            raise kind(answer["message"])

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._is_closing:
            return
        self._dead = f"rank {rank} of {self.shard.size} ended with status {status}"
        log.critical("%s: the model cannot go on", self._dead)
        self._meeting.close()
        if self._on_death is not None:
            self._on_death(self._dead)


def rank_config(config: ModelConfig, rank: int) -> ModelConfig:
    """The configuration of one rank: its device, its share of the threads and of the KV memory."""
    size = len(config.devices)
    threads = config.num_threads or usable_cores()
    return replace(
        config,
        device=config.devices[rank],
        devices=(),
        num_threads=max(1, threads // size),
        kv_bytes=config.kv_bytes // (size if config.devices[rank] == "cpu" else 1),
        prefix_host_bytes=0,  # spans of the other ranks are not kept on the host
    )
