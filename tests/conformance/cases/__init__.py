"""The rows of the table, a module for each part of the specification."""

import importlib

MODULES = (
    "model_states",
    "build",
    "model_calls",
    "start_request",
    "requests",
    "tensors",
    "generation",
    "sequences",
    "guided",
    "adapters",
    "results",
    "texts",
)


def load() -> None:
    """Registers every case, in the order of the specification."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
