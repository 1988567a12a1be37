"""A prefix cache without a model: a memory that knows what every span was computed from."""

from __future__ import annotations

from allspark_bus.prefix_keys import PrefixSalt
from allspark_workers.engine.pages import PageLedger
from allspark_workers.engine.prefix_cache import PrefixCache
from allspark_workers.engine.sequence import Sequence
from engine_helpers import request

SPAN = 4
SALT = PrefixSalt("model", SPAN)
Content = tuple[int, ...] | None


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Memory:
    """Spans and host slots as the tokens whose K and V they hold; also the host tier's copies."""

    def __init__(self, num_spans: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.spans: list[Content] = [None] * num_spans
        self.slots: list[Content] = [None] * num_slots
        self.num_saved = self.num_loaded = 0

    def save(self, span: int, slot: int) -> None:
        self.slots[slot] = self.spans[span]
        self.num_saved += 1

    def load(self, slot: int, span: int) -> None:
        self.spans[span] = self.slots[slot]
        self.slots[slot] = None  # whoever reads it again without saving first is found out
        self.num_loaded += 1


class Bench:
    """A cache, and requests that start, compute and end the way the scheduler makes them."""

    def __init__(self, spans: int = 12, slots: int = 0, ttl_s: float = 100.0) -> None:
        self.clock = Clock()
        self.ledger = PageLedger(spans)
        self.memory = Memory(spans, slots)
        self.cache = PrefixCache(self.ledger, SALT, ttl_s, self.clock, self.memory if slots else None)
        self.running: list[Sequence] = []
        self._serial = 0

    def start(self, prompt: list[int], generated: list[int] | None = None) -> Sequence | None:
        """Start a request if there is room; what it was given must be what its tokens give."""
        self._serial += 1
        item = request(f"r{self._serial}", prompt, max_length=10_000, generated=generated or [])
        seq = Sequence(item, self._serial)
        self.cache.expire()
        chain = self.cache.match(seq)
        if -(-seq.length // SPAN) - len(self.cache.shared_spans(chain)) > self.ledger.free:
            return None
        seq.spans = self.cache.adopt(seq, chain)
        self.cache.load_restored()
        for span in seq.spans[len(chain) :]:
            self.memory.spans[span] = None
        self.verify(seq)
        self.running.append(seq)
        return seq

    def verify(self, seq: Sequence) -> None:
        for index in range(seq.num_computed // SPAN):
            assert self.memory.spans[seq.spans[index]] == tuple(seq.tokens[: (index + 1) * SPAN].tolist())

    def compute(self, seq: Sequence, count: int = 10_000) -> None:
        """The next tokens of a request go through the model."""
        self.cache.skip(seq)
        end = min(seq.num_computed + count, seq.length)
        for index in range(seq.num_computed // SPAN, end // SPAN):
            assert self.ledger.num_holders(seq.spans[index]) == 1, "only the owner writes"
            self.memory.spans[seq.spans[index]] = tuple(seq.tokens[: (index + 1) * SPAN].tolist())
        seq.num_computed = end
        self.cache.extend(seq)
        self.verify(seq)

    def end(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.ledger.release(seq.request_id)
        self.cache.leave(seq)

    def run(self, prompt: list[int]) -> int:
        """Serve a request from start to end; how many of its tokens came from the cache."""
        seq = self.start(prompt)
        assert seq is not None
        cached = seq.num_computed
        self.compute(seq)
        self.end(seq)
        self.check()
        return cached

    def check(self) -> None:
        self.ledger.check()
        self.cache.check()
