"""The engine's errors: one tree, so that the worker process maps it to a status in one place."""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine and the model loader raise on purpose."""


class ModelIOError(EngineError):
    """A model or weight file is missing, truncated or unreadable; the message names the file."""


class UnsupportedModelError(EngineError):
    """The checkpoint is readable, but asks for something this engine does not do; says what is known."""


class ModelMemoryError(EngineError):
    """Weights or KV spans do not fit into the device's memory; says what was asked and what there is."""


class GroupError(EngineError):
    """A rank of a model on several devices is gone: the model cannot go on, and its process must end."""


class LedgerError(EngineError):
    """The page ledger does not balance: a programming error, never a user's."""


class AdapterNotFoundError(EngineError):
    """No directory of that name below the model roots holds an adapter."""


class AdapterLimitError(EngineError):
    """An adapter's rank, or the number of adapters, is over the limit of the worker."""
