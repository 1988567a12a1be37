"""Adapters through the whole fleet: base and adapters at once, a worker that dies, adapters that are bad.

The reference is peft's merged model, teacher-forced as in test_greedy.
"""

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from allspark.client import AsyncClient, Client, GenerateOptions, ModelOptions, StatusError
from allspark.launcher import Fleet, FleetOptions
from allspark_bus import keys
from allspark_bus.store import Store
from allspark_proto import allspark_service_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_helpers import TinyModels, random_prompt
from lora_helpers import merged, write_adapter

from tests.system.conftest import report

VARIANT, NEW = "qwen2", 400
NAMES = ("plain", "stable", "patterns")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def root(tiny: TinyModels) -> Path:
    """The model root; one adapter lies in the model's own directory."""
    path = tiny.path(VARIANT)
    write_adapter(tiny, VARIANT, "plain", path)
    for name in NAMES[1:]:
        write_adapter(tiny, VARIANT, name, path.parent / "adapters")
    write_adapter(tiny, VARIANT, "regex", path.parent / "adapters", r=128, lora_alpha=4)
    (path.parent / "adapters" / "stable" / "adapter_model.safetensors").rename(path.parent / "moved")
    write_adapter(tiny, VARIANT, "layers", path.parent / "adapters")
    (path.parent / "adapters" / "layers" / "adapter_model.safetensors").write_bytes(b"x")
    (path.parent / "moved").rename(path.parent / "adapters" / "stable" / "adapter_model.safetensors")
    return path.parent


@pytest.fixture(scope="module")
def fleet(root: Path) -> Iterator[Fleet]:
    options = FleetOptions(
        start_timeout_s=300.0, workers=2, model_roots=(root,), worker_args=("--lora-max-num=2",)
    )
    with Fleet(options, report) as fleet:
        settings = ModelOptions(
            matmul_precision="highest", max_length=600, lora_names=["plain", "adapters/stable"]
        )
        fleet.load_model("m", root / VARIANT, settings)
        yield fleet


def location(name: str) -> str:
    return name if name in ("", "plain") else f"adapters/{name}"


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    assert len(answer) == NEW
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer


async def test_a_killed_workers_requests_go_on_with_their_adapters(
    fleet: Fleet, tiny: TinyModels, root: Path
) -> None:
    """More adapters than a worker may hold; the third is loaded at first use, on whichever worker it runs."""
    prompts = {(name, n): random_prompt(n, seed=n) for name in (*NAMES, "") for n in (5, 40, 77, 121)}
    victim = min(fleet.workers, key=lambda w: str(w.ready["worker"]))  # who is chosen if both are as free
    async with AsyncClient(fleet.addresses) as client:
        requests = {}
        for key, prompt in prompts.items():
            if key[0] == "":  # what it does not run by now, it is given
                victim.signal(signal.SIGSTOP)
            options = GenerateOptions(max_new_tokens=NEW, lora_name=location(key[0]))
            requests[key] = await client.submit("m", prompt, options)
        victim.kill()
        results = await asyncio.gather(*[r.result() for r in requests.values()])
        answers = dict(zip(requests, results, strict=True))
        assert await deaths(fleet, [r.uuid for r in requests.values()]) > 0
        for request in requests.values():
            await request.release()
    references = {"": tiny.reference(VARIANT)}
    references |= {name: merged(tiny, VARIANT, root / VARIANT / location(name)) for name in NAMES[:1]}
    references |= {name: merged(tiny, VARIANT, root / location(name)) for name in NAMES[1:]}
    for key, answer in answers.items():
        assert_greedy(references[key[0]], prompts[key], answer)
    victim.wait_ready(300)


async def deaths(fleet: Fleet, uuids: list[str]) -> int:
    """How often a worker died while it had one of these requests."""
    store = Store(fleet.redis_url)
    found = [await store.command("HGET", keys.request(f"default/{uuid}"), "dt") for uuid in uuids]
    await store.close()
    return sum(int(n or 0) for n in found)


BAD = {
    "nothing/there": (pb.ALLSPARK_PARAM_ERROR, "is not there"),
    "../outside": (pb.ALLSPARK_PARAM_ERROR, "is not there"),
    "adapters/regex": (pb.ALLSPARK_EXCEED_LIMIT_ERROR, "rank 128 .* the limit is 64"),
    "adapters/layers": (pb.ALLSPARK_IO_ERROR, "truncated"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_adapters_are_refused_with_the_reason(fleet: Fleet, root: Path, name: str) -> None:
    status, text = BAD[name]
    with Client(fleet.addresses) as client:
        with pytest.raises(StatusError, match=text) as e:
            client.submit("m", [5, 6, 7], GenerateOptions(lora_name=name))
        assert e.value.status == status
        with pytest.raises(StatusError, match=text) as e:
            client.build_model("other", str(root / VARIANT), ModelOptions(lora_names=[name]))
        assert e.value.status == status
