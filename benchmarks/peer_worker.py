"""The engine, a whole fleet, or `generate` of transformers, as one row of a peer comparison.

    python benchmarks/peer_worker.py engine|fleet|transformers MODEL [--device cuda:0] [--at-once N]

Measures greedy decoding with eos ignored, fixed prompts of 128 ids, 128 new tokens: one request alone (time
to first token, tokens per second after it) and 16 at once (all new tokens over wall time, prefill included).
Prints one line `RESULT {json}`, for a program that compares engines on one machine in the same hour.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from allspark_workers.engine.threads import set_environment

PROMPT, NEW, WARM = 128, 128, 8

Single = Callable[[list[int], int], tuple[list[int], list[float]]]
Batch = Callable[[list[list[int]], int], int]


def prompt(index: int) -> list[int]:
    rng = random.Random(1000 + index)
    return [rng.randrange(1000, 40_000) for _ in range(PROMPT)]


def measure(single: Single, batch: Batch, args: argparse.Namespace) -> dict[str, object]:
    """`single` returns ids and the times of submission and of every token; `batch` how many new tokens."""
    ready = time.time()
    single(prompt(99), WARM)
    batch([prompt(50 + i) for i in range(args.at_once)], WARM)
    ttft, decode, together, ids = [], [], [], []
    for _ in range(args.reps):
        ids, times = single(prompt(0), NEW)
        ttft.append((times[1] - times[0]) * 1e3)
        decode.append((len(times) - 2) / (times[-1] - times[1]))
    for _ in range(args.reps):
        start = time.time()
        count = batch([prompt(i) for i in range(args.at_once)], NEW)
        together.append(count / (time.time() - start))
    return {
        "ttft_ms": ttft, "decode_tok_s": decode, "tput_tok_s": together, "t_ready": ready, "ids16": ids[:16],
    }  # fmt: skip


def run_engine(model: Path, args: argparse.Namespace) -> dict[str, object]:
    import numpy as np
    from allspark_workers.engine.engine import Engine
    from allspark_workers.engine.types import EngineRequest, GenerationParams, ModelConfig
    from allspark_workers.models.loader import load_model

    start = time.time()
    config = ModelConfig(
        str(model),
        device=args.device,
        dtype=args.dtype,
        max_length=512,
        max_batch=args.at_once,
        num_threads=args.threads,
    )
    engine = Engine(load_model(config), config)
    engine.start()
    load_s = time.time() - start

    def submit(name: str, ids: list[int], new: int) -> None:
        engine.submit(EngineRequest(name, 1, np.asarray(ids), GenerationParams(max_length=len(ids) + new)))

    def single(ids: list[int], new: int) -> tuple[list[int], list[float]]:
        times, tokens = [time.time()], []
        submit("one", ids, new)
        while engine.has_work():
            for output in engine.step():
                tokens += output.tokens
                times += [time.time()] * len(output.tokens)
        return tokens, times

    def batch(prompts: list[list[int]], new: int) -> int:
        for i, ids in enumerate(prompts):
            submit(f"r{i}", ids, new)
        count = 0
        while engine.has_work():
            count += sum(len(o.tokens) for o in engine.step())
        return count

    return measure(single, batch, args) | {"load_call_s": load_s, "version": "engine"}


def run_fleet(model: Path, args: argparse.Namespace) -> dict[str, object]:
    from allspark.client import Client, GenerateOptions, ModelOptions
    from allspark.launcher import Fleet, FleetOptions

    start = time.time()
    worker_args = (f"--dtype={args.dtype}", f"--num-threads={args.threads}")
    parts = FleetOptions(model_roots=(model.parent,), worker_args=worker_args, device=args.device)
    with Fleet(parts) as fleet, ThreadPoolExecutor(args.at_once) as pool:
        # The prompts come again in every repetition, and the peers compute them each time.
        options = ModelOptions(max_length=512, max_batch=args.at_once, enable_prefix_cache=False)
        fleet.load_model("m", model, options)
        load_s = time.time() - start
        with Client(fleet.addresses) as client:

            def single(ids: list[int], new: int) -> tuple[list[int], list[float]]:
                times, tokens = [time.time()], []
                with client.submit("m", ids, GenerateOptions(max_new_tokens=new)) as request:
                    for arrived in request.stream():
                        tokens += arrived
                        times += [time.time()] * len(arrived)
                return tokens, times

            def batch(prompts: list[list[int]], new: int) -> int:
                return sum(len(t) for t, _ in pool.map(lambda ids: single(ids, new), prompts))

            return measure(single, batch, args) | {"load_call_s": load_s, "version": "fleet"}


def run_transformers(model: Path, args: argparse.Namespace) -> dict[str, object]:
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer

    class Arrivals(BaseStreamer):
        """When the prompt went in, and when each token came out."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.times.append(time.time())

        def end(self) -> None:
            pass

    start = time.time()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    kind = transformers.AutoModelForCausalLM
    peer = kind.from_pretrained(model, dtype=dtype, use_safetensors=True).to(args.device).eval()
    peer.generation_config.eos_token_id = None
    load_s = time.time() - start

    def generate(prompts: list[list[int]], new: int, streamer: BaseStreamer | None = None) -> torch.Tensor:
        ids = torch.tensor(prompts, device=args.device)
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        found = peer.generate(ids, attention_mask=mask, streamer=streamer, **settings)
        return found[:, ids.shape[1] :].cpu()

    def single(ids: list[int], new: int) -> tuple[list[int], list[float]]:
        arrivals, began = Arrivals(), time.time()
        tokens = generate([ids], new, arrivals)[0].tolist()
        return tokens, [began, *arrivals.times[1:]]

    def batch(prompts: list[list[int]], new: int) -> int:
        return generate(prompts, new).numel()

    version = f"transformers {transformers.__version__}"
    return measure(single, batch, args) | {"load_call_s": load_s, "version": version}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["engine", "fleet", "transformers"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    set_environment(args.threads)
    run = {"engine": run_engine, "fleet": run_fleet, "transformers": run_transformers}[args.what]
    print("RESULT " + json.dumps(run(args.model.resolve(), args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
