"""adapter_config.json of a PEFT adapter: which modules it adapts, with which rank and scale; no torch.

Semantics are those of the `peft` library (LoraConfig). What changes the result and is not done here is
refused; what only concerned the training is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import regex

from allspark_workers.engine.errors import ModelIOError, UnsupportedModelError
from allspark_workers.files import read_text

Number = TypeVar("Number", int, float)

CONFIG_FILE: Final = "adapter_config.json"
ALL_LINEAR: Final = "all-linear"
_MAX_BYTES: Final = 1 << 20
_MATCH_S: Final = 1.0
_USED: Final = frozenset(
    (
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("init_lora_weights", "bias"),
    )
)
# They describe the training, or settings of methods that are refused below where they are switched on.
_IGNORED: Final = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
    )
)
# Initialisations that change the base weights, which then differ from the checkpoint's.
_BASE_CHANGING: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """One adapter's settings. `targets`, `excluded`: a regular expression, or module names (suffixes)."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """Whether the module of that full name, such as `model.layers.0.self_attn.q_proj`, is adapted.

        "all-linear" covers every module; the caller asks for linear ones only.
        """
        if self.excluded and _matches(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return self._is_chosen_layer(module)
        if isinstance(self.targets, str) or module in self.targets:
            return _matches(self.targets, module)
        return _matches(self.targets, module) and self._is_chosen_layer(module)

    def rank_of(self, module: str) -> int:
        """Rank of the module's matrices."""
        return _look_up(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA: Kalajdzievski, 2023)."""
        alpha, rank = _look_up(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank

    def _is_chosen_layer(self, module: str) -> bool:
        """`layers_to_transform`: the first number in the name (after `layers_pattern`) is the layer."""
        if not self.layers:
            return True
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."]:
            found = _match(pattern, module)
            if found is not None:
                return int(found[1]) in self.layers
        return False


def _match(pattern: str, module: str, *, is_full: bool = False) -> Any:
    """As `re.match` or `re.fullmatch`, whose time is exponential for some patterns.

    Raises ModelIOError after _MATCH_S.
    """
    try:
        match = regex.fullmatch if is_full else regex.match
        return match(pattern, module, timeout=_MATCH_S)
    except TimeoutError as error:
        raise ModelIOError(
            f"the regular expression {pattern[:200]!r} of {CONFIG_FILE} takes too long; simplify it"
        ) from error


def _matches(wanted: str | tuple[str, ...], module: str) -> bool:
    if isinstance(wanted, str):
        return _match(wanted, module, is_full=True) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _look_up(pattern: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first key that matches the end of the module's name, as a regular expression."""
    keys = (key for key in pattern if _match(rf"(.*\.)?({key})$", module))
    key = next(keys, None)
    return default if key is None else pattern[key]


def read_lora_config(directory: Path) -> LoraConfig:
    """Raises ModelIOError (unreadable or malformed) or UnsupportedModelError (with what is not done)."""
    path = directory / CONFIG_FILE
    try:
        fields = json.loads(read_text(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelIOError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ModelIOError(f"{path} does not hold a JSON object")
    try:
        return parse_lora_config(fields)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"adapter {directory.name}: {error}") from error
    except (
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        ArithmeticError,
        regex.error,
        RecursionError,
    ) as error:
        raise ModelIOError(f"{path} lacks or misstates a value: {error!r}") from error


def parse_lora_config(fields: Mapping[str, Any]) -> LoraConfig:
    """Raises UnsupportedModelError; for malformed values what Python raises (see `read_lora_config`)."""
    _refuse_unsupported(fields)
    config = LoraConfig(
        rank=_positive(fields["r"]),
        alpha=_finite(fields["lora_alpha"]),
        is_rank_stabilised=bool(fields.get("use_rslora")),
        rank_pattern={key: _positive(rank) for key, rank in (fields.get("rank_pattern") or {}).items()},
        alpha_pattern={key: _finite(alpha) for key, alpha in (fields.get("alpha_pattern") or {}).items()},
        targets=_names(fields["target_modules"]),
        excluded=_names(fields.get("exclude_modules") or ()),
        layers=_layers(fields.get("layers_to_transform")),
        layers_pattern=_patterns(fields.get("layers_pattern")),
    )
    if not config.targets:
        raise ValueError("target_modules is empty")
    regexes = [*config.rank_pattern, *config.alpha_pattern, *config.layers_pattern]
    regexes += [names for names in (config.targets, config.excluded) if isinstance(names, str)]
    for pattern in regexes:
        regex.compile(pattern)
    return config


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    kind, task = fields.get("peft_type"), fields.get("task_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"peft_type is {kind!r}; only LORA is supported")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedModelError(f"task_type is {task!r}; only CAUSAL_LM is supported")
    if fields.get("bias", "none") != "none":
        raise UnsupportedModelError(f"bias is {fields['bias']!r}; biases are not adapted, only 'none' works")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        raise UnsupportedModelError(
            f"init_lora_weights is {start!r}, which changed the base weights; convert the adapter with peft"
        )
    # Everything else, also what a later version of peft adds, is off while its value is empty.
    for name in sorted(set(fields) - _USED - _IGNORED):
        if fields[name]:
            raise UnsupportedModelError(f"{name} is {fields[name]!r}, which is not supported")


def _positive(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"a rank is {value!r}, not a positive number")
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"an alpha is {value!r}, not a finite number")
    return float(value)


def _names(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    names = tuple(value)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{value!r} is neither a regular expression nor a list of module names")
    return names


def _layers(value: Any) -> tuple[int, ...]:
    values: Iterable[Any] = () if value is None else [value] if isinstance(value, int) else value
    layers = tuple(values)
    if not all(isinstance(layer, int) and layer >= 0 for layer in layers):
        raise ValueError(f"layers_to_transform is {value!r}, not a list of layer numbers")
    return layers


def _patterns(value: Any) -> tuple[str, ...]:
    return () if not value else (value,) if isinstance(value, str) else tuple(value)
