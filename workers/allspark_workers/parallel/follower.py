"""The process of a rank other than 0: does what rank 0 tells it, until its standard input ends.

    python -m allspark_workers.parallel.follower RANK SIZE STORE

STORE is the file of rank 0's `Meeting`. Answers go to standard output: one to the connection, to the
configuration (when the weights are loaded) and to each allocation.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, BinaryIO

import torch

from allspark_workers.engine.device import use_device
from allspark_workers.engine.embeddings import replace_embeddings
from allspark_workers.engine.errors import EngineError
from allspark_workers.engine.forward import last_of_rows, step_tensors
from allspark_workers.engine.kv import allocate_kv, copy_spans, plan_kv
from allspark_workers.engine.threads import apply_threads
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.decoder import KVCache
from allspark_workers.models.loader import Model, load_model
from allspark_workers.models.shards import Shard
from allspark_workers.parallel import messages
from allspark_workers.parallel.adapters import FollowedAdapters
from allspark_workers.parallel.group import Group, open_store


class Follower:
    """One rank's weights and KV cache."""

    def __init__(self, config: ModelConfig, model: Model) -> None:
        self._config = config
        self._model = model
        self._cache: KVCache | None = None
        self._adapters = FollowedAdapters(config, model)

    def obey(self, message: dict[str, Any]) -> bool:
        """Do what rank 0 says; whether it wants an answer."""
        if "allocate" in message:
            layout = plan_kv(self._model, self._config).with_spans(message["allocate"])
            self._cache = allocate_kv(self._model, layout)
            return True
        if "free" in message:
            self._cache = None
            return False
        if self._adapters.obey(message):
            return False
        if self._cache is None:
            raise RuntimeError("a step before the KV cache was allocated")
        with torch.inference_mode(), use_device(self._model.device):
            if "copy" in message:
                copy_spans(self._cache, dict(message["copy"]))
            else:
                self._compute(message, self._cache)
        return False

    def _compute(self, message: dict[str, Any], cache: KVCache) -> None:
        """The same calls as rank 0's `Runner` makes; this rank's logits go to it with the last of them."""
        decoder, is_inference = self._model.decoder, "infer" in message
        batch = messages.unpack_batch(message["infer" if is_inference else "step"])
        step = step_tensors(self._model, self._config.span_tokens, batch)
        given = messages.unpack_given(message["given"])
        ops = self._adapters.ops(batch, message["adapters"])
        residual = replace_embeddings(decoder.embed(ops, step.ids), given)
        hidden = decoder.hidden(ops, residual, step, cache)
        decoder.logits(ops, last_of_rows(hidden, batch) if is_inference else hidden)


def serve(shard: Shard, store_path: str, requests: BinaryIO, answers: BinaryIO) -> None:
    """Connect, load, and obey until `requests` ends."""
    first = messages.read(requests)
    if first is None:
        return
    settings: dict[str, Any] = json.loads(first["config"])
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    config = ModelConfig(**{**settings, **lists})
    apply_threads(config.num_threads)
    store = open_store(store_path, shard.size)
    messages.write(answers, {"connected": True})
    group = Group(store, shard, torch.device(config.device))
    try:
        follower = Follower(config, load_model(config, shard=shard, exchange=group))
    except EngineError as error:
        messages.write(answers, {"error": type(error).__name__, "message": f"rank {shard.rank}: {error}"})
        return
    messages.write(answers, {"loaded": True})
    while (message := messages.read(requests)) is not None:
        try:
            wants_answer = follower.obey(message)
        except EngineError as error:
            if "allocate" not in message:
                raise
            messages.write(answers, {"error": type(error).__name__, "message": f"rank {shard.rank}: {error}"})
            continue
        if wants_answer:
            messages.write(answers, {"done": True})


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    rank, size = map(int, sys.argv[1:3])
    serve(Shard(rank, size), sys.argv[3], sys.stdin.buffer, sys.stdout.buffer)
