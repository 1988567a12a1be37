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

from allspark_workers.engine.threads import set_environment

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

    import numpy as np
    import torch
    from allspark_proto import allspark_service_pb2 as pb
    from allspark_workers.engine.masks import Masks
    from allspark_workers.engine.sequence import Sequence
    from allspark_workers.engine.types import EngineRequest, GenerationParams, ModelConfig
    from allspark_workers.guided.guide import Guide
    from allspark_workers.guided.guides import Guides
    from allspark_workers.load import load_engine
    from allspark_workers.text import load_tokenizer

    config = ModelConfig(
        str(options.model), dtype=options.dtype, num_threads=options.threads, kv_bytes=512 << 20
    )
    engine = load_engine(config, lambda _fraction, _text: None)
    engine.start()
    tokenizer = load_tokenizer(options.model)
    prompt = np.array(tokenizer.encode_chat([{"role": "user", "content": QUESTION}]), np.int64)
    wanted = pb.GenerateConfig(eos_token_id=tokenizer.eos_ids[0])
    wanted.response_format.update({"type": "json_schema", "json_schema": json.dumps(SCHEMA)})

    async def prepare() -> list[Guide | None]:
        guides = Guides(max_bytes=1 << 18, cpu_s=2.0)
        try:
            return [await guides.prepare(wanted, engine.facts, []) for _ in range(AT_ONCE)]
        finally:
            await guides.close()

    tokens: dict[str, list[int]] = {}

    def step_s(guides: list[Guide | None]) -> float:
        """Median seconds of a step in which all of them decode."""
        for index, guide in enumerate(guides):
            params = GenerationParams(
                max_length=len(prompt) + NEW, do_sample=True, temperature=0.7, seed=index
            )
            engine.submit(EngineRequest(f"{index}", 1, prompt, params, guide=guide))
        steps = []
        while engine.has_work():
            started = time.perf_counter()
            outputs = engine.step()
            for output in outputs:
                tokens.setdefault(output.request_id, []).extend(output.tokens)
            if len(outputs) == AT_ONCE and all(len(o.tokens) == 1 for o in outputs):
                steps.append(time.perf_counter() - started)
        return statistics.median(steps[SKIPPED:])

    def masks_alone_s() -> tuple[float, float]:
        """CPU seconds a step: of the masks of all requests, and of reading the tokens that followed."""
        guides = asyncio.run(prepare())
        requests = [
            EngineRequest(f"{i}", 1, prompt, GenerationParams(max_length=len(prompt) + NEW), guide=guide)
            for i, guide in enumerate(guides)
        ]
        sequences = [Sequence(request, index) for index, request in enumerate(requests)]
        masks = Masks(engine.facts.vocab_size, AT_ONCE, torch.device("cpu"))
        filling = reading = 0.0
        for position in range(NEW - 1):
            times = [time.process_time()]
            masks.begin(sequences)
            masks.take()
            times.append(time.process_time())
            for index, guide in enumerate(guides):
                if guide is not None:
                    guide.advance(tokens[f"{index}"][position])
            times.append(time.process_time())
            filling += times[1] - times[0]
            reading += times[2] - times[1]
        return filling / (NEW - 1), reading / (NEW - 1)

    step_s(asyncio.run(prepare()))  # warm
    pairs = []
    for _ in range(options.pairs):
        before = step_s([None] * AT_ONCE)
        tokens.clear()
        pairs.append((before, step_s(asyncio.run(prepare()))))
    free, guided = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    least = [min(column) * 1e3 for column in zip(*pairs, strict=True)]
    print(f"step of {AT_ONCE}: free {free:.2f} ms, guided {guided:.2f} ms, median ratio {ratio:.3f}")
    print(f"quietest round: free {least[0]:.2f} ms, guided {least[1]:.2f} ms")
    filling, reading = masks_alone_s()
    print(f"CPU time alone: masks {filling * 1e3:.3f} ms, reading {reading * 1e3:.3f} ms a step")


if __name__ == "__main__":
    main()
