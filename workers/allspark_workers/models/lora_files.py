"""PEFT adapters on disk: found below the model roots, checked against the model, read into its layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from allspark_kernels import LoraWeights
from safetensors import SafetensorError, safe_open

from allspark_workers.engine.errors import (
    AdapterLimitError,
    AdapterNotFoundError,
    ModelIOError,
    UnsupportedModelError,
)
from allspark_workers.models.lora_config import ALL_LINEAR, CONFIG_FILE, read_lora_config
from allspark_workers.models.lora_sites import AdapterMatrix, AdapterSite

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_PICKLE_FILE: Final = "adapter_model.bin"
_PREFIX: Final = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_FLOATS: Final = ("F32", "F16", "BF16")
# Modules that a configuration may name and that cannot be adapted here.
_OUT_OF_REACH: Final = ("lm_head", "model.embed_tokens")


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter in the layout of a model: `sites[i]` for its i-th site, None where it has nothing.

    `digest`: hex, over configuration and weights.
    """

    sites: tuple[LoraWeights | None, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(site.nbytes for site in self.sites if site is not None)


def find_adapter(name: str, roots: Sequence[Path]) -> Path:
    """The real directory of an adapter: `name` below the first root that has it, or a path inside one.

    Symbolic links are followed first, so none leads out of the roots. Raises AdapterNotFoundError.
    """
    if not name or "\0" in name:
        raise AdapterNotFoundError(f"{name!r} is no name of an adapter")
    real_roots = [root.resolve() for root in roots]
    for root in real_roots:
        try:
            path = (root / name).resolve()
            is_inside = any(inside in path.parents for inside in real_roots)
            if is_inside and (path / CONFIG_FILE).is_file():
                return path
        except (OSError, RuntimeError) as error:
            raise AdapterNotFoundError(f"adapter {name!r} cannot be resolved: {error}") from error
    raise AdapterNotFoundError(
        f"adapter {name!r} is not there: neither the model's weights directory nor a model root has a "
        f"directory of that name with {CONFIG_FILE}"
    )


class AdapterReader:
    """One adapter's files, checked against the model's sites; the constructor reads no tensor.

    Raises ModelIOError (missing, malformed or inconsistent file), UnsupportedModelError (reason in the text),
    AdapterLimitError (a rank over `max_rank`).
    """

    def __init__(self, directory: Path, sites: Sequence[AdapterSite], max_rank: int) -> None:
        self._directory = directory
        self._sites = sites
        self._config = read_lora_config(directory)
        self._file = self._open()
        self._check(max_rank)

    def load(self, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
        """All matrices in `dtype` on `device`, B transposed and scaled. Raises as the constructor."""
        digest = self._digest()
        return AdapterWeights(tuple(self._site(site, dtype, device) for site in self._sites), digest)

    def _open(self) -> Any:
        path = self._directory / WEIGHTS_FILE
        if path.exists() and not path.is_file():
            raise ModelIOError(f"{path} is no regular file")
        try:
            return safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            hint = ""
            if (self._directory / _PICKLE_FILE).exists():
                hint = f"; {_PICKLE_FILE} is not read, because it would have to be unpickled: save it again"
            raise ModelIOError(f"{path} is missing{hint}") from error
        except (SafetensorError, OSError) as error:
            raise ModelIOError(f"{path} is truncated or not safetensors: {error}") from error

    def _check(self, max_rank: int) -> None:
        """Exactly the matrices that the configuration asks for, with the model's shapes."""
        config, name = self._config, self._directory.name
        for module in _OUT_OF_REACH:
            if config.targets != ALL_LINEAR and config.covers(module):
                raise UnsupportedModelError(f"adapter {name} adapts {module}, which is not supported")
        expected: dict[str, tuple[int, int]] = {}
        for site in self._sites:
            for matrix in site.matrices:
                if config.covers(matrix.module):
                    expected |= self._shapes(matrix, max_rank)
        if not expected:
            raise UnsupportedModelError(
                f"adapter {name}: target_modules {config.targets!r} names no linear layer of this model"
            )
        self._check_header(expected)

    def _shapes(self, matrix: AdapterMatrix, max_rank: int) -> dict[str, tuple[int, int]]:
        module, rank = matrix.module, self._config.rank_of(matrix.module)
        if rank > max_rank:
            raise AdapterLimitError(
                f"adapter {self._directory.name} has rank {rank} at {module}, the limit is {max_rank} "
                "(--lora-max-rank of the workers)"
            )
        return {module + _DOWN: (rank, matrix.columns), module + _UP: (matrix.rows, rank)}

    def _check_header(self, expected: dict[str, tuple[int, int]]) -> None:
        path = self._directory / WEIGHTS_FILE
        stored = {str(key) for key in self._file.keys()}  # noqa: SIM118 - not a mapping
        wanted = {_PREFIX + key: shape for key, shape in expected.items()}
        if surplus := sorted(stored - wanted.keys()):
            if surplus[0].endswith((_DOWN, _UP)):
                raise ModelIOError(
                    f"{path} holds {surplus[0]}, which target_modules or the model do not name"
                )
            raise UnsupportedModelError(f"{path} holds {surplus[0]}; only lora_A and lora_B are supported")
        if missing := sorted(wanted.keys() - stored):
            raise ModelIOError(f"{path} lacks {missing[0]} ({len(missing)} tensors are missing)")
        for key, shape in wanted.items():
            part = self._file.get_slice(key)
            if tuple(part.get_shape()) != shape:
                raise ModelIOError(f"{key} of {path} has shape {part.get_shape()}, expected is {list(shape)}")
            if part.get_dtype() not in _FLOATS:
                raise UnsupportedModelError(f"{key} of {path} is stored as {part.get_dtype()}, not as floats")

    def _site(self, site: AdapterSite, dtype: torch.dtype, device: torch.device) -> LoraWeights | None:
        downs: list[torch.Tensor] = []
        ups: list[torch.Tensor] = []
        for matrix in site.matrices:
            module = matrix.module
            if not self._config.covers(module):
                ups.append(torch.zeros((0, matrix.width), dtype=dtype, device=device))
                continue
            downs.append(self._tensor(module + _DOWN, dtype)[:, matrix.own_columns])
            up = self._tensor(module + _UP, torch.float32) * self._config.scale_of(module)
            up = up if matrix.taken is None else up[matrix.taken]
            ups.append(self._finite(module, up.to(dtype)).T.contiguous().to(device))
        if not downs:
            return None
        # Concatenation and scaling copy: what the file gives out may be a view of a mapped file.
        return LoraWeights(torch.cat(downs).to(device), tuple(ups))

    def _tensor(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._file.get_tensor(_PREFIX + key)
        except (SafetensorError, OSError) as error:
            raise ModelIOError(f"{key} of {self._directory} is unreadable: {error}") from error
        return self._finite(key, tensor.to(dtype))

    def _finite(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if not bool(tensor.isfinite().all()):
            raise ModelIOError(
                f"{key} of {self._directory} holds values that are not finite in {tensor.dtype}"
            )
        return tensor

    def _digest(self) -> str:
        state = hashlib.blake2b(digest_size=16)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            try:
                with (self._directory / name).open("rb") as file:
                    state.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise ModelIOError(f"{self._directory / name} cannot be read: {error}") from error
        return state.hexdigest()
