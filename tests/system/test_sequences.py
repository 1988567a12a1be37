"""Samples, beams, hidden states, probes and embeddings through a whole fleet; a worker is killed."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from allspark.client import AsyncClient, Client, GenerateOptions, ModelOptions
from allspark.client.options import start_request_message
from allspark.launcher import Fleet, FleetOptions
from allspark_bus import tensors
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.engine.families import sequence_seed

from tests.engine.engine_helpers import TinyModels, random_prompt
from tests.system.conftest import report

MODEL = "qwen2"
EXACT = ModelOptions(matmul_precision="highest", max_length=512, max_batch=16, enable_prefix_cache=False)
PROMPT = random_prompt(50, seed=21)
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 50, "seed": 4711}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def fleet(tiny: TinyModels) -> Iterator[Fleet]:
    options = FleetOptions(start_timeout_s=300.0, workers=2, model_roots=(tiny.path(MODEL),))
    with Fleet(options, report) as fleet:
        fleet.load_model(MODEL, tiny.path(MODEL), EXACT)
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(fleet.addresses) as client:
        yield client
        stat = client.stat(MODEL)
        assert (stat.used_span, stat.pendding_request, stat.running_request) == (0, 0, 0)


def run(client: Client, prompt: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """All sequences of a request, and their scores if there are any."""
    with client.submit(MODEL, prompt, GenerateOptions(**options)) as request:
        first = request.result()
        return [first, *request.progress.other_sequences()], request.progress.sequence_scores()


def ask(client: Client, message: pb.StartRequestRequest) -> tuple[dict[str, np.ndarray], list[int], str]:
    """Tensors, tokens and finish reason of any request."""
    reply, _ = client.call("StartRequest", message)
    assert reply.as_status == pb.ALLSPARK_SUCCESS
    with client.attach(MODEL, reply.uuid) as request:
        tokens = request.result()
        found = {k: tensors.to_array(k, t) for k, t in request.progress.tensors.items()}
        return found, tokens, request.finish_reason


def test_samples_equal_single_requests_with_their_seeds(client: Client) -> None:
    options = SAMPLED | {"max_new_tokens": 20}
    several, scores = run(client, PROMPT, num_return_sequences=3, **options)
    alone = [run(client, PROMPT, **(options | {"seed": sequence_seed(4711, i)}))[0][0] for i in range(3)]
    assert several == alone and len({tuple(tokens) for tokens in alone}) == 3 and scores == []
    chosen, _ = run(client, PROMPT, num_return_sequences=2, seed_arr=[4711, 8], top_k_arr=[50, 3], **options)
    assert chosen[0] == alone[0]
    assert chosen[1] == run(client, PROMPT, **(options | {"seed": 8, "top_k": 3}))[0][0]


def test_beams_equal_transformers(client: Client, tiny: TinyModels) -> None:
    beams = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5}
    sequences, scores = run(client, PROMPT, max_new_tokens=16, **beams)
    ids = torch.tensor([PROMPT])
    want = tiny.reference(MODEL).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **beams,
    )
    assert sequences == want.sequences[:, len(PROMPT) :].tolist()
    np.testing.assert_allclose(scores, want.sequences_scores, rtol=2e-5)


def test_inference_probe_and_embeddings(client: Client, tiny: TinyModels) -> None:
    message = start_request_message(MODEL, PROMPT, GenerateOptions(), "infer")
    message.infer_type = pb.ModelInference
    found, tokens, reason = ask(client, message)
    with torch.inference_mode():
        want = tiny.reference(MODEL)(torch.tensor([PROMPT]), output_hidden_states=True)
    assert (tokens, reason) == ([], "inferred")
    np.testing.assert_allclose(found["last_hidden_state"], want.hidden_states[-1], atol=2e-4)
    np.testing.assert_allclose(found["logits"], want.logits[:, -1], atol=2e-4)

    message = start_request_message(MODEL, PROMPT, GenerateOptions(probe_only=True), "probe")
    assert ask(client, message) == ({}, [], "probed")

    prompt = [5, 99, 99, 99, 6, 99, 99, 99, 7]
    values = np.random.default_rng(3).normal(0, 0.3, (2, 3, 64)).astype(np.float32)
    message = start_request_message(MODEL, prompt, GenerateOptions(max_new_tokens=8), "rich")
    message.mm_type = pb.MultiMediaTypeRichText
    message.inputs.tensor_map["99"].CopyFrom(tensors.from_array("99", values))
    embedded = tiny.reference(MODEL).get_input_embeddings()(torch.tensor([prompt])).detach().clone()
    embedded[0, 1:4], embedded[0, 5:8] = torch.from_numpy(values[0]), torch.from_numpy(values[1])
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    answer = tiny.reference(MODEL).generate(
        inputs_embeds=embedded, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert ask(client, message) == ({}, answer[0].tolist(), "length")


def test_a_killed_worker_changes_no_sequence(fleet: Fleet) -> None:
    """Sequence 0 goes on where it was; the others and the beams are computed again, and come out the same."""
    kinds = [
        GenerateOptions(max_new_tokens=400, num_return_sequences=3, **SAMPLED),
        GenerateOptions(max_new_tokens=400, num_beams=3, num_return_sequences=2),
    ]

    async def submit_all(client: AsyncClient) -> list[Any]:
        return [await client.submit(MODEL, PROMPT, options) for options in kinds * 2]

    async def collect(requests: list[Any]) -> list[Any]:
        found = []
        for request in requests:
            tokens = await request.result()
            arrays = {k: tensors.to_array(k, t).tolist() for k, t in request.progress.tensors.items()}
            assert request.finish_reason == "length"
            await request.release()
            found.append((tokens, arrays))
        return found

    async def both() -> None:
        async with AsyncClient(fleet.addresses) as client:
            quiet = await collect(await submit_all(client))
            assert quiet[:2] == quiet[2:] and sorted(quiet[0][1]) == ["sequence_1", "sequence_2"]
            requests = await submit_all(client)
            head = await anext(requests[0].stream())
            fleet.workers[0].kill()
            disturbed = await collect(requests)
            disturbed[0] = (head + disturbed[0][0], disturbed[0][1])
            assert disturbed == quiet
        await asyncio.to_thread(fleet.workers[0].wait_ready, 60)

    asyncio.run(both())
