"""What guided decoding adds to a decode step: 16 requests, free and guided in turns, in one process.

    python benchmarks/guided_masks.py MODEL [--threads N] [--pairs N] [--dtype bf16]

All are sampled with the same settings; the guided ones follow a JSON schema that outlasts the measurement.
Prints the median step of each kind and the median ratio of the pairs; and, since a busy machine hides what is
less than a millisecond, the CPU time of masks and of reading tokens alone, for the tokens of the last round.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.engine.threads import set_environment

if TYPE_CHECKING:
    from allspark_workers.engine.types import EngineRequest
    from allspark_workers.guided.guide import Guide

AT_ONCE, NEW, SKIPPED = 16, 96, 8
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "grün", "blau"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 100},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}
QUESTION = "Describe a person named Alice as JSON."


class Bench:
    """The engine, the question, and the tokens of the last round; torch is imported with it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import numpy as np
        from allspark_workers.engine.types import ModelConfig
        from allspark_workers.load import load_engine
        from allspark_workers.text import load_tokenizer

        config = ModelConfig(
            str(options.model), dtype=options.dtype, num_threads=options.threads, kv_bytes=512 << 20
        )
        self.engine = load_engine(config, lambda _fraction, _text: None)
        self.engine.start()
        tokenizer = load_tokenizer(options.model)
        chat = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
        self.prompt = np.array(chat, np.int64)
        self.wanted = pb.GenerateConfig(eos_token_id=tokenizer.eos_ids[0])
        self.wanted.response_format.update({"type": "json_schema", "json_schema": json.dumps(SCHEMA)})
        self.tokens: dict[str, list[int]] = {}

    async def prepare(self) -> "list[Guide | None]":
        """A guide for each request."""
        from allspark_workers.guided.guides import Guides

        guides = Guides(max_bytes=1 << 18, cpu_s=2.0)
        try:
            return [await guides.prepare(self.wanted, self.engine.facts, []) for _ in range(AT_ONCE)]
        finally:
            await guides.close()

    def request(self, index: int, guide: "Guide | None") -> "EngineRequest":
        """The request with that number."""
        from allspark_workers.engine.types import EngineRequest, GenerationParams

        params = GenerationParams(
            max_length=len(self.prompt) + NEW, do_sample=True, temperature=0.7, seed=index
        )
        return EngineRequest(f"{index}", 1, self.prompt, params, guide=guide)

    def step_s(self, guides: "list[Guide | None]") -> float:
        """Median seconds of a step in which all of them decode."""
        self.tokens.clear()
        for index, guide in enumerate(guides):
            self.engine.submit(self.request(index, guide))
        steps = []
        while self.engine.has_work():
            started = time.perf_counter()
            outputs = self.engine.step()
            for output in outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            if len(outputs) == AT_ONCE and all(len(o.tokens) == 1 for o in outputs):
                steps.append(time.perf_counter() - started)
        return statistics.median(steps[SKIPPED:])

    def masks_alone_s(self) -> tuple[float, float]:
        """CPU seconds a step: of the masks of all requests, and of reading the tokens that followed."""
        import torch
        from allspark_workers.engine.masks import Masks
        from allspark_workers.engine.sequence import Sequence

        guides = asyncio.run(self.prepare())
        sequences = [Sequence(self.request(index, guide), index) for index, guide in enumerate(guides)]
        masks = Masks(self.engine.facts.vocab_size, AT_ONCE, torch.device("cpu"))
        filling = reading = 0.0
        for position in range(NEW - 1):
            times = [time.process_time()]
            masks.begin(sequences)
            masks.take()
            times.append(time.process_time())
            for index, guide in enumerate(guides):
                if guide is not None:
                    guide.advance(self.tokens[f"{index}"][position])
            times.append(time.process_time())
            filling += times[1] - times[0]
            reading += times[2] - times[1]
        return filling / (NEW - 1), reading / (NEW - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    set_environment(options.threads)  # before torch is imported
    bench = Bench(options)
    bench.step_s(asyncio.run(bench.prepare()))  # warm
    pairs = [
        (bench.step_s([None] * AT_ONCE), bench.step_s(asyncio.run(bench.prepare())))
        for _ in range(options.pairs)
    ]
    free, guided = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    least = [min(column) * 1e3 for column in zip(*pairs, strict=True)]
    print(f"step of {AT_ONCE}: free {free:.2f} ms, guided {guided:.2f} ms, median ratio {ratio:.3f}")
    print(f"quietest round: free {least[0]:.2f} ms, guided {least[1]:.2f} ms")
    filling, reading = bench.masks_alone_s()
    print(f"CPU time alone: masks {filling * 1e3:.3f} ms, reading {reading * 1e3:.3f} ms a step")


if __name__ == "__main__":
    main()
