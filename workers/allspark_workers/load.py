"""The real engine behind the worker's port."""

from allspark_workers.engine.engine import Engine
from allspark_workers.engine.types import ModelConfig
from allspark_workers.models.loader import load_model
from allspark_workers.ports import EnginePort, Progress


def load_engine(config: ModelConfig, progress: Progress) -> EnginePort:
    """Loads the weights. Raises EngineError."""
    return Engine(load_model(config, progress), config)
