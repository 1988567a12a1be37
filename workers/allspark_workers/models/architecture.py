"""What distinguishes one model of the family from another; pure data, filled from HF or GGUF metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn", "longrope")
#: No model has more; a file that says so would have lists as long made for it.
MAX_LAYERS: Final = 4096
_MAX_SIZE: Final = 2**31
Activation = Literal["silu", "gelu_tanh"]


#: Rotations over a context, which is a number of tokens: beyond these the formula leaves the floats.
MIN_BETA, MAX_BETA = 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Rotary embedding: base and how it is stretched beyond the trained context.

    `divisors` (GGUF, longrope) divides each inverse frequency. `short_divisors` and `long_divisors` are the
    two sets of longrope, of which `rope.settled` chooses one.
    """

    kind: str = "default"
    theta: float = 10000.0
    rotary_dim: int = 64
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 2048
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    is_truncated: bool = True
    divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"the rotary dimension must be even and positive, not {self.rotary_dim}")
        if not (self.theta > 1 and self.factor > 0 and self.original_max_positions > 0):
            raise ValueError(
                f"rope base {self.theta}, factor {self.factor}, context {self.original_max_positions}"
            )
        numbers = (self.theta, self.factor, self.attention_factor or 0.0, self.mscale, self.mscale_all_dim)
        if not all(map(math.isfinite, numbers)) or min(numbers[2:]) < 0:
            raise ValueError(f"rope base, factor, attention factor and scales {numbers}")
        if not all(MIN_BETA <= beta <= MAX_BETA for beta in (self.beta_slow, self.beta_fast)):
            raise ValueError(f"rope betas {self.beta_fast}, {self.beta_slow}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"rope frequency factors {self.low_freq_factor}, {self.high_freq_factor}")
        for divisors in (self.divisors, self.short_divisors, self.long_divisors):
            if divisors and (len(divisors) != self.rotary_dim // 2 or not min(divisors) > 0):
                raise ValueError(f"rope divisors {divisors} for {self.rotary_dim} dimensions")
        if self.kind == "longrope" and not (self.divisors or (self.short_divisors and self.long_divisors)):
            raise ValueError("longrope needs short_factor and long_factor")


@dataclass(frozen=True, slots=True)
class MoeParams:
    """A mixture of experts in place of the MLP of the layers in `is_sparse`.

    `top_k` of `num_experts` experts serve a token, weighted by the router's softmax, divided by their sum if
    `is_normalised`. `shared_size`: width of an expert that serves every token behind a gate; 0: none.
    """

    num_experts: int
    top_k: int
    expert_size: int
    shared_size: int
    is_normalised: bool
    is_sparse: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts per token")
        if self.expert_size < 1 or self.shared_size < 0:
            raise ValueError(f"experts of width {self.expert_size}, shared {self.shared_size}")


def checked_layers(count: int) -> int:
    """`count`, before anything is made for each layer; raises ValueError for what no model has."""
    if not 1 <= count <= MAX_LAYERS:
        raise ValueError(f"num_layers must be positive and at most {MAX_LAYERS}, not {count}")
    return count


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary positions, grouped heads and a gated MLP.

    `max_positions`: longest context in tokens. `windows`: per layer, how many tokens attention sees, the
    current one included (0: all); empty means 0 everywhere. `is_tied`: the output matrix is the embedding
    (None: decided by what the checkpoint holds). `is_rope_interleaved`: the checkpoint's q and k are made for
    rotating neighbours (x[2i], x[2i + 1]); the loader reorders them to halves. `has_post_norms`: what a block
    gives back is normalised before it is added. `norm_offset` is added to the weights of norms. `query_scale`
    multiplies scores (None: 1 / sqrt(head_dim)); `attention_soft_cap`, `final_soft_cap`: of scores and
    logits, 0: none. `local_rope`: of layers with a window, None: as all.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeParams
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool | None
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    activation: Activation = "silu"
    has_post_norms: bool = False
    is_rope_interleaved: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    local_rope: RopeParams | None = None
    moe: MoeParams | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if not 1 <= getattr(self, name) < _MAX_SIZE:
                raise ValueError(f"{name} must be positive and below 2^31, not {getattr(self, name)}")
        checked_layers(self.num_layers)
        if not 0.0 <= self.norm_eps < math.inf:
            raise ValueError(f"the epsilon of norms is {self.norm_eps}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} KV heads")
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"the rotary dimension {self.rope.rotary_dim} exceeds head_dim {self.head_dim}")
        for name in ("attention_soft_cap", "final_soft_cap"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.moe is not None and len(self.moe.is_sparse) != self.num_layers:
            raise ValueError(f"{len(self.moe.is_sparse)} kinds of MLP for {self.num_layers} layers")
        if self.windows and (len(self.windows) != self.num_layers or min(self.windows) < 0):
            raise ValueError(f"attention windows {self.windows} for {self.num_layers} layers")

    def window_of(self, layer: int) -> int:
        """Tokens that attention of this layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts in place of an MLP."""
        return self.moe is not None and self.moe.is_sparse[layer]

    @property
    def num_parameters(self) -> int:
        """Weights in the matrices, an untied output matrix included; norms and biases are left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        widths = [self.intermediate_size] * self.num_layers
        if self.moe is not None:
            sparse = self.moe.num_experts * self.moe.expert_size + self.moe.shared_size
            widths = [sparse if is_sparse else self.intermediate_size for is_sparse in self.moe.is_sparse]
        mlps = 3 * self.hidden_size * sum(widths)
        return self.num_layers * attention + mlps + 2 * self.vocab_size * self.hidden_size
