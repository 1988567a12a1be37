"""What the specification says a token must be, from logits that transformers computes on the same weights.

The rules are those of section 2.5 in plain NumPy, written from the text and sharing nothing with the product.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

Logits = NDArray[np.float64]
BANNED = -1e9
#: Two implementations of one network differ by rounding; a choice this close to the best one is the best one.
TOLERANCE = 2e-3


@functools.lru_cache(maxsize=4)
def reference(path: str) -> Any:
    """The model of a Hugging Face directory in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def logits(path: str, ids: Sequence[int]) -> Logits:
    """[len(ids), vocabulary]: row i predicts the token after ids[i]."""
    return reference(path)(torch.tensor([list(ids)])).logits[0].double().numpy()


@torch.inference_mode()
def beams(path: str, prompt: Sequence[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """New tokens and scores of transformers' beam search, best first."""
    model = reference(path)
    if options.get("eos_token_id") is None:
        model.generation_config.eos_token_id = None
    found = model.generate(
        torch.tensor([list(prompt)]), do_sample=False, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip
    return [row[len(prompt) :].tolist() for row in found.sequences], found.sequences_scores.tolist()


def constrained(row: Logits, ids: Sequence[int], num_prompt: int, **config: Any) -> Logits:
    """The logits of the position after `ids` once penalties and bans have been applied (2.5.2, 1 to 5)."""
    x = row.copy()
    generated = list(ids[num_prompt:])
    scope = generated if config.get("suppress_repetition_in_generation") else list(ids)
    if penalty := config.get("repetition_penalty", 0.0):
        for token in set(scope):
            x[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
    for token in set(generated):
        x[token] -= config.get("presence_penalty", 0.0)
    x[_completes_an_ngram(ids, config.get("no_repeat_ngram_size", 0))] = BANNED
    if len(ids) < config.get("min_length", 0):
        x[config["eos_token_id"]] = BANNED
    for word in config.get("bad_words_ids", ()):
        if len(word) == 1 or list(ids[-(len(word) - 1) :]) == list(word[:-1]):
            x[word[-1]] = BANNED
    return x


def _completes_an_ngram(ids: Sequence[int], size: int) -> list[int]:
    if size <= 0 or len(ids) < size:
        return []
    tail = list(ids[len(ids) - size + 1 :])
    return [ids[i + size - 1] for i in range(len(ids) - size + 1) if list(ids[i : i + size - 1]) == tail]


def kept(x: Logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0) -> set[int]:
    """The tokens among which one is drawn (2.5.4); those as close to the border as rounding are in it."""
    order = np.argsort(-x, kind="stable")[: top_k or len(x)]
    if top_k:
        order = np.flatnonzero(x >= x[order[-1]] - TOLERANCE)
        order = order[np.argsort(-x[order], kind="stable")]
    if not 0 < top_p < 1:
        return set(order.tolist())
    q = np.exp((x[order] - x[order[0]]) / temperature)
    before = np.cumsum(q / q.sum()) - q / q.sum()
    return set(order[before <= top_p + TOLERANCE].tolist())


def check_greedy(path: str, prompt: Sequence[int], tokens: Sequence[int], **config: Any) -> None:
    """Every token is the best one of its position, given the tokens before it."""
    ids = [*prompt, *tokens]
    rows = logits(path, ids[:-1])
    for i, token in enumerate(tokens):
        n = len(prompt) + i
        x = constrained(rows[n - 1], ids[:n], len(prompt), **config)
        assert x[token] >= x.max() - TOLERANCE, f"token {i} is {token}, the best is {int(x.argmax())}"


def check_drawn(path: str, prompt: Sequence[int], tokens: Sequence[int], **config: Any) -> None:
    """Every token lies in the set from which the specification draws."""
    ids = [*prompt, *tokens]
    rows = logits(path, ids[:-1])
    selection = {k: config[k] for k in ("temperature", "top_k", "top_p") if k in config}
    for i, token in enumerate(tokens):
        n = len(prompt) + i
        assert token in kept(constrained(rows[n - 1], ids[:n], len(prompt), **config), **selection), i
