"""The prefix cache: K and V of prompt spans, found again by what they were computed from. Pure bookkeeping.

A node stands for one full span of prompt tokens behind a chain of such spans (`allspark_bus.prefix_keys`).
While requests hold its span it is in use; afterwards the span is idle and stays until its memory is needed
or the time to live has passed since its last use. Then it is dropped, or moves to a slot of the host tier,
from which a hit brings it back. Spans of generated tokens are not cached: those were computed by the decode
kernel, and the prefill kernel would give other bits.

Everybody who holds a node's span holds those of its ancestors, so an ancestor is never idle for longer than
its descendants: they go first, and what is on the device is always the beginning of a chain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from allspark_bus.prefix_keys import PrefixSalt, span_keys

from allspark_workers.engine.errors import LedgerError
from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.sequence import Sequence


class HostStore(Protocol):
    """Memory of the host for `num_slots` spans."""

    num_slots: int

    def save(self, span: int, slot: int) -> None:
        """Copy a span's content to a slot."""

    def load(self, slot: int, span: int) -> None:
        """Copy a slot's content to a span."""


@dataclass(slots=True, eq=False)
class Node:
    """One cached span. `span` is where it is on the device, `slot` in the host tier.

    Both are set between a hit on the host tier and `load_restored`: the content is still in the slot.
    """

    key: bytes
    parent: Node | None
    tokens: bytes  # the ids of the span, as the memory of an int64 array
    span: int | None
    slot: int | None = None
    last_used_s: float = 0.0
    children: dict[bytes, Node] = field(default_factory=dict)

    def stands_for(self, parent: Node | None, tokens: bytes) -> bool:
        """Whether it was computed from these tokens behind this chain: equal keys alone prove nothing."""
        return self.parent is parent and self.tokens == tokens


class Trail:
    """What a sequence has to do with the cache: the keys of its full prompt spans, and those that are cached.

    `nodes[i]` stands for the sequence's span i while it runs. A closed trail is not extended any more.
    """

    __slots__ = ("_content", "_stride", "is_closed", "keys", "matched", "nodes", "version")

    def __init__(self, keys: list[bytes], content: bytes, stride: int) -> None:
        self.keys = keys
        self._content = content
        self._stride = stride
        self.nodes: list[Node] = []
        self.is_closed = False
        self.matched: list[Node] = []
        self.version = -1

    def tokens(self, index: int) -> bytes:
        """The ids of a span."""
        return self._content[index * self._stride : (index + 1) * self._stride]


class PrefixCache:
    """Owns the nodes and the slots of the host tier; becomes the keeper of `ledger`.

    `model` and `cache_mode` salt the keys. `ttl_s`: a node can be hit until so many seconds after its last
    use; with 0, only while it is in use. `clock` counts monotonic seconds. `host` None: no host tier.
    """

    def __init__(
        self,
        ledger: PageLedger,
        salt: PrefixSalt,
        ttl_s: float,
        clock: Callable[[], float],
        host: HostStore | None = None,
    ) -> None:
        self._ledger = ledger
        self._salt = salt
        self._size = salt.span_size
        self._ttl_s = ttl_s
        self._clock = clock
        self._host = host
        self._nodes: dict[bytes, Node] = {}
        self._by_span: dict[int, Node] = {}
        self._slots = list(range(host.num_slots)) if host is not None else []
        self._on_host: OrderedDict[bytes, Node] = OrderedDict()  # longest unused first
        self._restored: list[Node] = []
        self._version = 0  # changes whenever a match may have become shorter or longer
        ledger.keeper = self

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_on_host(self) -> int:
        """Spans that are in the host tier only."""
        return len(self._on_host)

    # ---- looking up and taking over -----------------------------------------------------------------

    def match(self, seq: Sequence) -> list[Node]:
        """The longest chain of cached spans that a sequence can start with, its last token excepted.

        Call `expire` first. None if every position is wanted (inference).
        """
        trail = self._trail(seq)
        if trail.version != self._version:
            trail.matched = self._walk(seq, trail)
            trail.version = self._version
        return trail.matched

    def _walk(self, seq: Sequence, trail: Trail) -> list[Node]:
        chain: list[Node] = []
        for index in range(self._limit(seq)):
            node = self._nodes.get(trail.keys[index])
            if node is None or not node.stands_for(chain[-1] if chain else None, trail.tokens(index)):
                break
            chain.append(node)
        return chain

    def shared_spans(self, chain: list[Node]) -> set[int]:
        """Spans of `chain` that others hold: `adopt` takes all that it needs but these from the free ones."""
        spans = {node.span for node in chain if node.span is not None}
        return {span for span in spans if self._ledger.num_holders(span)}

    def adopt(self, seq: Sequence, chain: list[Node]) -> list[int]:
        """Give a sequence that starts the spans of `chain` and new ones for its other tokens; all its spans.

        Its first tokens count as computed; `load_restored` has to be called before the step. Raises
        ValueError if there is no room.
        """
        owner = seq.request_id
        shared = [node.span for node in chain if node.span is not None]
        restored = chain[len(shared) :]
        for node in restored:
            del self._on_host[node.key]  # what is allocated next must not push these out
        self._ledger.share(owner, shared)
        own = self._ledger.allocate(owner, -(-seq.length // self._size) - len(shared))
        if own is None:
            raise ValueError(f"request {owner} was admitted without room for it")
        for node, span in zip(restored, own, strict=False):
            node.span = span
            self._by_span[span] = node
        self._restored += restored
        self._trail(seq).nodes = list(chain)
        _count_cached(seq, len(chain) * self._size)
        return shared + own

    def load_restored(self) -> None:
        """Copy what was taken from the host tier into its spans."""
        for node in self._restored:
            if self._host is not None and node.slot is not None and node.span is not None:
                self._host.load(node.slot, node.span)
                self._slots.append(node.slot)
                node.slot = None
        self._restored.clear()

    def skip(self, seq: Sequence) -> None:
        """Go on behind the next spans of a sequence if another one has computed them meanwhile."""
        trail, size = self._trail(seq), self._size
        if seq.gang is not None:
            return  # the others of its gang hold the spans that it would leave uncomputed
        # A span that it has begun itself is taken over too.
        while not trail.is_closed and len(trail.nodes) == seq.num_computed // size:
            index = len(trail.nodes)
            node = self._nodes.get(trail.keys[index]) if index < self._limit(seq) else None
            parent = trail.nodes[-1] if index else None
            if node is None or node.span is None or not node.stands_for(parent, trail.tokens(index)):
                return
            self._switch(seq, index, node)
            trail.nodes.append(node)
            _count_cached(seq, len(trail.nodes) * size)

    # ---- adding -------------------------------------------------------------------------------------

    def extend(self, seq: Sequence) -> None:
        """Add the prompt spans that a running sequence has computed since the last call.

        Where another request has added the same span before, the sequence goes on with that one.
        """
        trail = self._trail(seq)
        count = min(seq.num_computed // self._size, len(trail.keys))
        while not trail.is_closed and len(trail.nodes) < count:
            self._add(seq, trail, len(trail.nodes))

    def _add(self, seq: Sequence, trail: Trail, index: int) -> None:
        key, span = trail.keys[index], seq.spans[index]
        parent = trail.nodes[-1] if index else None
        tokens = trail.tokens(index)
        node = self._nodes.get(key)
        is_orphan = parent is not None and self._nodes.get(parent.key) is not parent  # after `clear`
        if is_orphan or (node is not None and not node.stands_for(parent, tokens)):
            trail.is_closed = True  # at a collision of keys the older one stays
            return
        if node is not None and node.span not in (None, span) and seq.gang is not None:
            trail.is_closed = True  # the others of its gang hold this one, so it cannot be exchanged
            return
        if node is None:
            node = self._nodes[key] = Node(key, parent, tokens, span)
            if parent is not None:
                parent.children[key] = node
            self._by_span[span] = node
            self._version += 1
        elif node.span is None:
            self._leave_host(node)
            node.span = span
            self._by_span[span] = node
        elif node.span != span:
            self._switch(seq, index, node)
        trail.nodes.append(node)

    def _switch(self, seq: Sequence, index: int, node: Node) -> None:
        """Let a sequence hold a node's span in the place of its own for the same tokens."""
        if node.span is None:
            raise LedgerError("a span that is not on the device cannot be shared")
        self._ledger.share(seq.request_id, [node.span])
        seq.spans[index] = node.span
        # Also puts them in order: what is released together becomes idle from the end.
        self._ledger.exchange({seq.request_id: seq.spans})

    def leave(self, seq: Sequence) -> None:
        """The sequence has given its spans back; it starts from the cache again if it is queued."""
        if seq.trail is not None:
            seq.trail.nodes = []
            seq.trail.is_closed = False

    # ---- the ledger's keeper ------------------------------------------------------------------------

    def keeps(self, span: int) -> bool:
        """A span has lost its last holder: whether it is cached."""
        node = self._by_span.get(span)
        if node is None:
            return False
        if self._ttl_s <= 0:
            self._drop(node)
            return False
        node.last_used_s = self._clock()
        return True

    def evict(self, span: int) -> None:
        """An idle span is given away: its content moves to the host tier, or is dropped."""
        node = self._by_span.pop(span)
        node.span = None
        self._version += 1
        if node.slot is None and not self._is_expired(node, self._clock()):
            node.slot = self._take_slot()
            if node.slot is not None and self._host is not None:
                self._host.save(span, node.slot)
        if node.slot is None:
            self._drop(node)
        else:
            self._on_host[node.key] = node

    def _take_slot(self) -> int | None:
        if not self._slots and self._on_host:
            self._drop(next(iter(self._on_host.values())))
        return self._slots.pop() if self._slots else None

    def _leave_host(self, node: Node) -> None:
        self._on_host.pop(node.key, None)
        if node.slot is not None:
            self._slots.append(node.slot)
            node.slot = None

    # ---- forgetting ---------------------------------------------------------------------------------

    def expire(self) -> None:
        """Drop what has not been used for the time to live."""
        now_s = self._clock()
        while (span := self._ledger.longest_idle) is not None and self._is_expired(
            self._by_span[span], now_s
        ):
            self._drop(self._by_span[span])
        while self._on_host and self._is_expired(node := next(iter(self._on_host.values())), now_s):
            self._drop(node)

    def next_expiry_s(self) -> float | None:
        """When `expire` will have something to do, on the clock; None if nothing is idle."""
        span = self._ledger.longest_idle
        unused = [self._by_span[span]] if span is not None else []
        unused += [next(iter(self._on_host.values()))] if self._on_host else []
        return min((node.last_used_s + self._ttl_s for node in unused), default=None)

    def clear(self) -> None:
        """Forget everything; spans in use stay with their holders."""
        for node in [node for node in self._nodes.values() if node.parent is None]:
            self._drop(node)

    def _is_expired(self, node: Node, now_s: float) -> bool:
        return now_s - node.last_used_s >= self._ttl_s

    def _drop(self, node: Node) -> None:
        """Forget a node and its descendants; their idle spans and their slots become free."""
        if node.parent is not None:
            node.parent.children.pop(node.key, None)
        stack = [node]
        while stack:
            gone = stack.pop()
            stack += gone.children.values()
            del self._nodes[gone.key]
            if gone.span is not None:
                del self._by_span[gone.span]
                self._ledger.discard(gone.span)
            self._leave_host(gone)
            gone.span, gone.parent, gone.children = None, None, {}
        self._version += 1

    # ---- details ------------------------------------------------------------------------------------

    def _trail(self, seq: Sequence) -> Trail:
        if seq.trail is None:
            prompt = seq.tokens[: seq.num_prompt]
            keys = list(span_keys(self._salt_of(seq), prompt))
            seq.trail = Trail(keys, prompt.tobytes(), self._size * prompt.itemsize)
        return seq.trail

    def _salt_of(self, seq: Sequence) -> PrefixSalt:
        adapter = seq.request.adapter
        embeddings = seq.request.content_salt.hex()
        return replace(
            self._salt, adapter=adapter.digest if adapter is not None else "", embeddings=embeddings
        )

    def _limit(self, seq: Sequence) -> int:
        """Prompt spans that may come from the cache: the newest token is computed, it gives the logits."""
        if seq.is_inference:
            return 0
        return min(seq.num_prompt, seq.length - 1) // self._size

    def check(self) -> None:
        """Raise LedgerError unless nodes, spans and slots agree; call it between steps."""
        for key, node in self._nodes.items():
            parent = node.parent
            if node.key != key or (parent is not None and self._nodes.get(parent.key) is not parent):
                raise LedgerError("a cached span is filed wrongly or has lost its parent")
            if (node.span is None) == (node.slot is None):
                raise LedgerError("a cached span is nowhere, or in two places")
            if node.span is not None and (self._by_span.get(node.span) is not node):
                raise LedgerError(f"span {node.span} does not lead to its node")
            if node.span is not None and parent is not None and parent.span is None:
                raise LedgerError(f"span {node.span} is on the device, the span before it is not")
        spans = {node.span for node in self._nodes.values() if node.span is not None}
        if spans != set(self._by_span):
            raise LedgerError("spans are cached without a node")
        for span in spans:
            if not self._ledger.is_idle(span) and not self._ledger.num_holders(span):
                raise LedgerError(f"span {span} is cached, but free")
        if len(spans) < self._ledger.num_idle:
            raise LedgerError("an idle span is not cached")
        total = self._host.num_slots if self._host is not None else 0
        if len(self._on_host) + len(self._slots) != total or len(set(self._slots)) != len(self._slots):
            raise LedgerError(f"{len(self._on_host)} used + {len(self._slots)} free slots are not {total}")


def _count_cached(seq: Sequence, num_computed: int) -> None:
    """The sequence goes on after `num_computed` tokens that it did not have to compute."""
    seq.num_cached += max(0, num_computed - max(seq.num_computed, seq.num_prefilled))
    seq.num_computed = num_computed
