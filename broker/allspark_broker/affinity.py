"""Affinity: which workers were lately sent which leading token blocks, and so hold their KV. Pure.

An adapter counts as a block before the first: a worker that was sent it has it in memory, for any prompt.
A hint, not knowledge: a worker may have evicted what it was sent; then the request merely costs its prefill,
or its adapter is loaded again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allspark_bus import tensors
from allspark_bus.catalogue import ModelRecord
from allspark_bus.errors import FleetError
from allspark_bus.prefix_keys import PrefixSalt, span_keys
from allspark_proto import allspark_service_pb2 as pb

#: Tokens per block where the model leaves the span size to the worker; it need not be the worker's choice.
BLOCK_TOKENS = 32
#: Leading blocks that are told apart: beyond them every worker that matches is good enough.
MAX_BLOCKS = 256
#: Blocks remembered, over all models; the least recently used are forgotten.
MAX_KEYS = 1 << 16
#: For how long an adapter is taken to be in a worker's memory where no prefix cache says how long.
ADAPTER_TTL_S = 300.0
#: Workers remembered per block, the latest ones.
MAX_HOLDERS = 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys of a request's leading blocks, and for how long a worker keeps their KV after the last use."""

    keys: tuple[bytes, ...] = ()
    ttl_s: float = 0.0


class PrefixAffinity:
    """`record_of(model)` is the catalogue's record; `clock` counts monotonic seconds."""

    def __init__(
        self,
        record_of: Callable[[str], ModelRecord | None],
        clock: Callable[[], float],
        max_keys: int = MAX_KEYS,
    ) -> None:
        self._record_of = record_of
        self._clock = clock
        self._max_keys = max_keys
        # Key -> worker -> when it was last sent a request with that block, oldest first.
        self._holders: OrderedDict[bytes, OrderedDict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def prefix(self, request: pb.StartRequestRequest) -> Prefix:
        """What to route the request by; nothing for a model that keeps no prefix beyond its last user."""
        record = self._record_of(request.model_name)
        if record is None:
            return Prefix()
        config = record.model_config()
        adapter = _adapter_key(request)
        if not config.enable_prefix_cache or config.prefix_cache_ttl == 0:
            return Prefix(adapter, ADAPTER_TTL_S)
        try:
            prompt = tensors.prompt_ids(request)
        except FleetError:
            return Prefix(adapter, ADAPTER_TTL_S)  # a request without token ids has no prefix to route by
        size = config.cache_span_size or BLOCK_TOKENS
        salt = PrefixSalt(
            model=request.model_name,
            span_size=size,
            adapter=request.config.lora_name,
            cache_mode=config.cache_mode,
            embeddings=_embeddings(request),
        )
        # The last token is always computed, so a block that ends with it is never served from a cache.
        keys = span_keys(salt, prompt[:-1], MAX_BLOCKS)
        return Prefix((*adapter, *keys), float(config.prefix_cache_ttl))

    def matches(self, prefix: Prefix) -> Mapping[str, int]:
        """Worker -> how many leading blocks of the prefix it was sent recently enough; at least one."""
        since = self._clock() - prefix.ttl_s
        found: dict[str, int] = {}
        for index, key in enumerate(prefix.keys):
            holders = self._holders.get(key)
            if holders is None:
                break
            for worker_id, used_s in holders.items():
                if used_s >= since and found.get(worker_id, 0) == index:
                    found[worker_id] = index + 1
        return found

    def record(self, prefix: Prefix, worker_id: str) -> None:
        """A request with that prefix goes to the worker now."""
        now_s = self._clock()
        # Deepest first: a block is then never forgotten before those that only follow it.
        for key in reversed(prefix.keys):
            holders = self._holders.setdefault(key, OrderedDict())
            holders[worker_id] = now_s
            holders.move_to_end(worker_id)
            if len(holders) > MAX_HOLDERS:
                holders.popitem(last=False)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)


def _adapter_key(request: pb.StartRequestRequest) -> tuple[bytes, ...]:
    """The key that stands for the request's adapter; none for the base model."""
    name = request.config.lora_name
    if not name:
        return ()
    parts = [part.encode() for part in (request.model_name, name)]
    content = b"adapter" + b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return (hashlib.blake2b(content, digest_size=16).digest(),)


def _embeddings(request: pb.StartRequestRequest) -> str:
    """A content hash of what replaces the embeddings of placeholder tokens."""
    if request.mm_type == pb.TextInput:
        return ""
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(request.inputs.tensor_map.items()):
        if name != "input_ids":
            for part in (name.encode(), str(list(tensor.shape.dims)).encode(), tensor.data):
                content.update(len(part).to_bytes(8, "little") + part)
    return content.hexdigest()
