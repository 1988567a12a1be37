"""Depth: the demo model on real workers, asked for everything that a request may contain.

The quiet run is one of the same requests on the same fleet, before the first fault.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
from allspark import demo_model
from allspark.client import AsyncClient, GenerateOptions, ModelOptions
from allspark.text import load_tokenizer
from safetensors.numpy import save_file

from tests.chaos.workload import Answer, Ask, ServedModel

AT_ONCE = 8
LAYERS, HIDDEN, KV_HIDDEN, RANK = 30, 576, 192, 8  # of SmolLM2-135M; the rank is the adapter's
ADAPTERS = ("first", "second")
REGEX = r"(yes|no), because [a-z ]{5,40}\."
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTIONS = (
    "Who are you?",
    "Name three colours.",
    "Why is the sky blue?",
    "Écris une phrase, s'il te plaît.",
)


class RealWorkload:
    """A fixed set of requests, rehearsed once; the load asks for them in an order of the seed.

    `variants`: how many of each kind, up to one for each of `QUESTIONS`.
    """

    def __init__(self, seed: int, variants: int) -> None:
        self._seed = seed
        self._variants = min(variants, len(QUESTIONS))
        self._pool: list[Ask] = []
        self._answers: list[Answer] = []

    def serve(self, root: Path) -> ServedModel:
        path = demo_model.fetch()
        for number, name in enumerate(ADAPTERS):
            write_adapter(root / name, number)
        options = ModelOptions(max_length=1024, max_batch=8, prefix_cache_ttl_s=2)
        # One adapter at a time: the two take turns in being loaded and evicted.
        args = ("--dtype=bf16", "--lora-max-num=1", "--kv-memory=512MiB")
        return ServedModel(path, (path.parent, root), worker_args=args, options=options, pace=4.0)

    async def rehearse(self, addresses: Sequence[str]) -> None:
        """Every request once, several at a time, and then those that are made from the answers."""
        self._pool = requests(self._seed, self._variants, load_tokenizer(demo_model.fetch()).eos_ids[0])
        self._answers = await rehearsed(addresses, self._pool)
        stopped = [
            stopping(asked, answer)
            for asked, answer in zip(self._pool, self._answers, strict=True)
            if asked.options.lora_name and not asked.options.do_sample
        ]
        self._answers += await rehearsed(addresses, stopped)
        self._pool += stopped

    def ask(self, index: int) -> Ask:
        rng = random.Random(f"{self._seed}/{index}")
        asked = self._pool[rng.randrange(len(self._pool))]
        expected = self.expected(asked)
        is_stopped = rng.random() < 0.1 and not expected.tensors and len(expected.tokens) > 0
        return replace(asked, stop_after=rng.randint(1, len(expected.tokens))) if is_stopped else asked

    def expected(self, asked: Ask) -> Answer:
        return self._answers[self._pool.index(replace(asked, stop_after=0))]


def requests(seed: int, variants: int, eos: int) -> list[Ask]:
    """So many of each kind; `eos` ends what is guided or asked as text."""
    rng = random.Random(seed)
    prefix = ids(rng, 100)
    made: list[Ask] = []
    for number in range(variants):
        sampled = GenerateOptions(
            max_new_tokens=rng.randint(20, 60), do_sample=True, temperature=0.9, top_p=0.95, seed=number + 1
        )
        greedy = GenerateOptions(max_new_tokens=rng.randint(8, 60))
        spiced = replace(
            sampled, top_k=50, repetition_penalty=1.2, presence_penalty=0.3, no_repeat_ngram_size=3
        )
        ends = replace(greedy, max_new_tokens=80, eos_token_id=eos)
        made += [
            Ask(ids(rng, rng.randint(4, 60)), greedy),
            Ask(ids(rng, rng.randint(4, 60)), sampled),
            Ask(ids(rng, 30), replace(spiced, bad_words_ids=[ids(rng, 1), ids(rng, 2)])),
            Ask(ids(rng, 40), replace(sampled, num_return_sequences=3)),
            Ask(ids(rng, 40), replace(greedy, num_beams=3, num_return_sequences=2, length_penalty=0.5)),
            Ask(prefix + ids(rng, 20), sampled),  # shares three spans of the prefix cache with the others
            Ask(ids(rng, 700), replace(greedy, max_new_tokens=12)),  # computed in chunks
            Ask(ids(rng, 30), replace(greedy, lora_name=ADAPTERS[number % 2])),
            Ask(ids(rng, 30), replace(sampled, lora_name=ADAPTERS[number % 2])),
            Ask([{"role": "user", "content": QUESTIONS[number]}], ends),
            Ask(QUESTIONS[number], guided("regex", regex=REGEX, seed=number, eos=eos)),
            Ask(QUESTIONS[number], guided("json_schema", json_schema=json.dumps(SCHEMA), eos=eos)),
            Ask(ids(rng, 12), GenerateOptions(), is_inference=True),
        ]
    return made


def guided(kind: str, *, eos: int, seed: int = 0, **document: str) -> GenerateOptions:
    """Text that follows a document; greedy without a seed."""
    return GenerateOptions(
        max_new_tokens=60, eos_token_id=eos, do_sample=seed > 0, temperature=0.7, seed=seed,
        response_format={"type": kind, **document},
    )  # fmt: skip


def stopping(asked: Ask, answer: Answer) -> Ask:
    """The same request, ending at two tokens from the middle of its answer."""
    middle = len(answer.tokens) // 2
    return replace(asked, options=replace(asked.options, stop_words_ids=[answer.tokens[middle : middle + 2]]))


def ids(rng: random.Random, count: int) -> list[int]:
    """Random ordinary token ids."""
    return [rng.randrange(1000, 40_000) for _ in range(count)]


async def rehearsed(addresses: Sequence[str], pool: Sequence[Ask]) -> list[Answer]:
    """The answers of an undisturbed fleet, in order."""
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(client: AsyncClient, asked: Ask) -> Answer:
        async with room, await asked.submit(client, f"quiet-{uuid4().hex}") as request:
            tokens = await request.result()
            return Answer.of(request, tokens)

    async with AsyncClient(addresses) as client:
        return list(await asyncio.gather(*[answer(client, asked) for asked in pool]))


def write_adapter(directory: Path, seed: int) -> None:
    """A LoRA adapter of the demo model's queries and values with random weights, as PEFT saves it."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, width in (("q_proj", HIDDEN), ("v_proj", KV_HIDDEN)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.normal(0, 0.05, (RANK, HIDDEN)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.normal(0, 0.05, (width, RANK)).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16}
    config |= {"target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
