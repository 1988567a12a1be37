"""Text in, text out: the fleet tokenizes prompts and conversations, and its text is that of the tokens."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from allspark.client import AsyncClient, Client, GenerateOptions, ModelOptions, StatusError
from allspark.client.options import start_request_message
from allspark.launcher import Fleet, FleetOptions
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.text import Tokenizer, load_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from tests.fleet.scripted_engine import expected_tokens
from tests.system.conftest import SCRIPTED, report

PARAM, LIMIT = 2, 7
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say Größe 日本 😀"}]
TEXTS = ["Hello, world!", "  Größe – 日本語 😀👍🏽 ", "<|im_start|>user\nhi<|im_end|>", "a"]


def write_tokenizer(path: Path) -> Tokenizer:
    """A byte-level tokenizer without a word of the tests, so that characters are cut into bytes."""
    path.mkdir()
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["the quick brown fox", "jumps over the lazy dog"] * 5, trainer)
    raw.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    raw.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}answer:"
    config = {"eos_token": "<|end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_tokenizer(tmp_path_factory.getbasetemp() / "byte-level")


@pytest.fixture(scope="module")
def fleet(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Scripted engines on two workers: "m" has a tokenizer, "slow" takes time, "mute" has none."""
    root = tmp_path_factory.mktemp("text-models")
    own = {"tokenizer": [str(tmp_path_factory.getbasetemp() / "byte-level")], "max_batch": 16}
    bare = root / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_text("{")
    (root / "m.json").write_text(json.dumps(own))
    (root / "slow.json").write_text(json.dumps(own | {"step_s": 0.02}))
    (root / "mute.json").write_text(json.dumps({"tokenizer": [str(root), str(bare)]}))
    options = FleetOptions(
        start_timeout_s=300.0, workers=2, model_roots=(root,), worker_command=(sys.executable, SCRIPTED)
    )
    with Fleet(options, report) as fleet:
        for name in ("m", "slow", "mute"):
            fleet.load_model(name, root / f"{name}.json")
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(fleet.addresses) as client:
        yield client


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_every_token_together_is_the_text_of_all(
    client: Client, tokenizer: Tokenizer, text: str
) -> None:
    """The scripted tokens are random bytes: characters begin, break off and are completed all the time."""
    tokens = expected_tokens(tokenizer.encode(text), 200)
    with client.submit("m", text, GenerateOptions(max_new_tokens=200, early_stopping=False)) as request:
        assert "".join(request.stream_text()) == tokenizer.decode(tokens)
        again = client.attach("m", request.uuid)
        assert again.result() == tokens, "ids come as ever"
        assert again.progress.take_text() == tokenizer.decode(tokens), "one answer with all of it"


def test_conversation_with_the_model_s_template(client: Client, tokenizer: Tokenizer) -> None:
    expected = expected_tokens(tokenizer.encode_chat(CHAT), 20)
    with client.submit("m", CHAT, GenerateOptions(max_new_tokens=20, early_stopping=False)) as request:
        assert request.result() == expected


async def test_asyncio_client(fleet: Fleet, tokenizer: Tokenizer) -> None:
    client = AsyncClient(fleet.addresses)
    try:
        options = GenerateOptions(max_new_tokens=30, early_stopping=False)
        request = await client.submit("m", "hello", options)
        pieces = [piece async for piece in request.stream_text()]
        assert "".join(pieces) == tokenizer.decode(expected_tokens(tokenizer.encode("hello"), 30))
        await request.release()
    finally:
        await client.close()


def test_token_clients_get_no_text(client: Client, tokenizer: Tokenizer) -> None:
    with client.submit("m", tokenizer.encode("hello"), GenerateOptions(max_new_tokens=5)) as request:
        request.result()
        assert request.progress.tensors == {}


def test_a_killed_worker_keeps_the_text_exactly_once(
    fleet: Fleet, client: Client, tokenizer: Tokenizer
) -> None:
    """The other worker goes on where the text was cut, in the middle of a character or not."""
    options = GenerateOptions(max_new_tokens=150, early_stopping=False)
    prompts = [f"prompt {i}" for i in range(4)]
    requests = [client.submit("slow", prompt, options) for prompt in prompts]
    streams = [request.stream_text() for request in requests]
    texts = [next(stream) for stream in streams]
    fleet.workers[0].kill()
    for prompt, text, request, stream in zip(prompts, texts, requests, streams, strict=True):
        expected = tokenizer.decode(expected_tokens(tokenizer.encode(prompt), 150))
        assert text + "".join(stream) == expected
        request.release()
    fleet.workers[0].wait_ready(300.0)


def start(client: Client, model: str, **inputs: pb.Tensor) -> tuple[int, str]:
    message = pb.StartRequestRequest(model_name=model, inputs=pb.TensorMap(tensor_map=inputs))
    message.config.uuid = "refused"
    with pytest.raises(StatusError) as error:
        reply, trailing = client.call("StartRequest", message)
        if not reply.as_status:
            client.call("ReleaseRequest", pb.StopRequestRequest(uuid="refused"))
            pytest.fail(f"accepted: {inputs}")
        raise StatusError("StartRequest", reply.as_status, trailing["allspark-reason"])
    return error.value.status, str(error.value)


def string(data: bytes, dims: tuple[int, ...] = (1,)) -> pb.Tensor:
    return pb.Tensor(data_type=pb.STRING, shape=pb.Tensor.Shape(dims=dims), data=data)


def number(value: int) -> pb.Tensor:
    data = value.to_bytes(8, "little", signed=True)
    return pb.Tensor(data_type=pb.INT64, shape=pb.Tensor.Shape(dims=[1]), data=data)


REFUSED = [
    ({"text": string(b"hi"), "input_ids": number(5)}, PARAM, "'input_ids' and 'text': give one of them"),
    ({"text": string(b"hi"), "messages": string(b"[]")}, PARAM, "'text' and 'messages'"),
    ({"text": string(b"\xff")}, PARAM, "not UTF-8"),
    ({"text": string(b"ab", (2,))}, PARAM, "its shape is [1]"),
    ({"text": number(5)}, PARAM, "must be a STRING"),
    ({"text": string(b"")}, LIMIT, "the prompt is empty"),
    ({"text": string("日本語".encode() * 100)}, LIMIT, "900 tokens, the limit is 510"),
    ({"text": string(b"x" * 40_000)}, LIMIT, "40000 bytes, which cannot fit"),
    ({"text": string(b"hi"), "max_new_tokens": number(0)}, PARAM, "at least 1"),
    ({"text": string(b"hi"), "max_new_tokens": number(5000)}, LIMIT, "max_length 5002"),
    ({"messages": string(b"[{")}, PARAM, "messages is not JSON"),
    ({"messages": string(b"[]")}, PARAM, "list of 1 to"),
    ({"messages": string(b'{"role": "user"}')}, PARAM, "must be a JSON list"),
    ({"messages": string(b"[1]")}, PARAM, "messages[0] is no JSON object"),
    ({"messages": string(b'[{"role": "user"}]')}, PARAM, "no string 'content'"),
]


@pytest.mark.parametrize(("inputs", "status", "reason"), REFUSED)
def test_what_is_refused_and_why(
    client: Client, inputs: dict[str, pb.Tensor], status: int, reason: str
) -> None:
    answer = start(client, "m", **inputs)
    assert answer[0] == status
    assert reason in answer[1]


def test_a_model_without_a_tokenizer_says_so(client: Client) -> None:
    status, reason = start(client, "mute", text=string(b"hi"))
    assert status == PARAM
    assert "tokenizer.json does not exist" in reason
    assert "is no tokenizer" in reason
    assert "send input_ids" in reason


def test_a_resend_is_the_same_request_and_ends_are_the_model_s(client: Client, tokenizer: Tokenizer) -> None:
    """What is recorded is not what was sent, yet the same message is a retry and another one a conflict."""
    message = start_request_message("m", "hello", GenerateOptions(max_new_tokens=3), "twice")
    for _ in range(2):
        assert client.call("StartRequest", message)[0].as_status == 0
    other = start_request_message("m", "other", GenerateOptions(max_new_tokens=3), "twice")
    assert client.call("StartRequest", other)[0].as_status == PARAM
    assert len(client.attach("m", "twice").result()) <= 3
    client.call("ReleaseRequest", pb.StopRequestRequest(uuid="twice"))


# ---- the real thing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Client]:
    options = FleetOptions(
        start_timeout_s=300.0, model_roots=(smollm2.parent,), worker_args=("--dtype=bf16",)
    )
    with Fleet(options, report) as fleet:
        fleet.load_model("smollm2", smollm2, ModelOptions(max_length=256, max_batch=8))
        with Client(fleet.addresses) as client:
            yield client


@pytest.mark.slow
def test_smollm2_answers_text_as_it_answers_its_ids(real: Client, smollm2: Path) -> None:
    own = load_tokenizer(smollm2)
    for prompt, ids in (("The capital of France is", None), (CHAT, own.encode_chat(CHAT))):
        ids = own.encode(prompt) if isinstance(prompt, str) else ids
        assert ids is not None
        by_ids = GenerateOptions(max_new_tokens=24, eos_token_id=own.eos_ids[0])
        with real.submit("smollm2", ids, by_ids) as request:
            tokens = request.result()
        with real.submit("smollm2", prompt, GenerateOptions(max_new_tokens=24)) as request:
            text = "".join(request.stream_text())
            assert text == own.decode(tokens)
            assert real.attach("smollm2", request.uuid).result() == tokens


@pytest.mark.slow
def test_smollm2_gives_characters_of_several_tokens_whole(real: Client, smollm2: Path) -> None:
    """A grammar makes it say what it would not say by itself."""
    wanted = "日本語 😀👍🏽 Größe"
    own = load_tokenizer(smollm2)
    assert len(own.encode(wanted)) > len(wanted)
    form = {"type": "regex", "regex": wanted}
    options = GenerateOptions(max_new_tokens=64, response_format=form)
    with real.submit("smollm2", "Say it: ", options) as request:
        pieces = list(request.stream_text())
    assert "".join(pieces) == wanted
    assert not any("\ufffd" in piece for piece in pieces)
