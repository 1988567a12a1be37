"""How the weights of a model are kept in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from allspark_kernels import QuantFormat, backend_for

from allspark_workers.models.architecture import Architecture

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
# The output matrix decides every token: with 4-bit weights it gets 8.
_HEAD: Final = QuantFormat(8, 0)
_FORMATS: Final = {
    "int8": QuantFormat(8, 0),
    "int4": QuantFormat(4, 128),
    "int4_g64": QuantFormat(4, 64),
    "int4_g32": QuantFormat(4, 32),
}
_SCALE_BITS: Final = 32  # scale and offset of a group, float16 each


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype`: of embedding, KV and what is not quantised; `format`: of the matrices, None: dtype.

    `keeps_stored`: matrices that the checkpoint holds quantised stay so. `rounds_inputs`: products take
    activations rounded to `dtype`. `name`: what the model's facts say.
    """

    name: str
    dtype: torch.dtype
    format: QuantFormat | None = None
    keeps_stored: bool = False
    rounds_inputs: bool = False

    @property
    def head_format(self) -> QuantFormat | None:
        """Format of the output matrix."""
        return None if self.format is None else _HEAD

    def weight_bytes(self, arch: Architecture) -> int:
        """What the matrices will occupy, about."""
        tables = 2 * arch.vocab_size * arch.hidden_size
        if self.format is None:
            return arch.num_parameters * self.dtype.itemsize
        bits = self.format.bits + (_SCALE_BITS / self.format.group if self.format.group else 0)
        layers = int((arch.num_parameters - tables) * bits / 8)
        return layers + tables // 2 * (self.dtype.itemsize + 1)


def precision_of(asked: str, own: torch.dtype, device: torch.device) -> Precision:
    """What `ModelConfig.dtype` means for a checkpoint whose own dtype is `own`.

    fp32 on the CPU keeps what is quantised in the file as it is: the kernels give the same bits as with the
    values in fp32, out of a fraction of the memory.
    """
    if asked in _FORMATS:
        return Precision(asked, own, _FORMATS[asked])
    dtype = own if asked == "auto" else _DTYPES[asked]
    keeps = dtype is torch.float32 and device.type == "cpu" and backend_for(device) == "native"
    return Precision(_NAMES[dtype], dtype, None, keeps, asked != "auto")
