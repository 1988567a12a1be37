"""The real engine behind the worker's port."""

import logging
import os
import weakref

import torch

from allspark_workers.engine.engine import Engine
from allspark_workers.engine.memory import give_back
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.loader import architecture_of, load_model
from allspark_workers.models.shards import Shard
from allspark_workers.parallel.leader import Leader
from allspark_workers.ports import EnginePort, Progress

log = logging.getLogger(__name__)

EXIT_RANK_LOST = 71


def load_engine(config: ModelConfig, progress: Progress) -> EnginePort:
    """Loads the weights, on as many devices as `config` names. Raises EngineError.

    If a rank of a model on several devices ends, this process ends at once: its requests go on elsewhere.
    """
    give_back(torch.device(config.device))  # what a load that failed left behind would count as used
    if len(config.devices) < 2:
        return Engine(load_model(config, progress), config)
    return load_parallel(config, progress)


def load_parallel(config: ModelConfig, progress: Progress) -> Engine:
    """Rank 0's engine of a model on several devices; the other ranks end when the engine is dropped."""
    Shard(0, len(config.devices)).architecture(architecture_of(config))  # before processes are started
    leader = Leader(config, _leave)
    try:
        model = load_model(leader.config, progress, leader.shard, leader.group)
        leader.wait_loaded()
        engine = Engine(model, leader.config, leader=leader)
    except BaseException:
        leader.close()
        raise
    weakref.finalize(engine, leader.close)
    return engine


def _leave(reason: str) -> None:
    log.critical("%s: this worker exits", reason)
    os._exit(EXIT_RANK_LOST)
