"""The server under test, through its gRPC interface alone."""

import contextlib
import itertools
import json
import time
import uuid as uuid_lib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

TIMEOUT_S = 120.0
MAX_LENGTH = 1024  # of the models that cases build
FINISHED, INTERRUPTED = pb.GenerateFinished, pb.GenerateInterrupted
OK, PARAM, IO, MEMORY, RUNTIME, LIMIT, INVALID, ILLEGAL_ID, CACHE_OUT, DENIED = (
    *(0, 2, 3, 4, 5, 7, 8),
    *(10, 11, 12),
)
_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


@dataclass
class Server:
    """`addresses`: gateways of one server, asked in turn. `other_tenant`: an address of another
    tenant, "" if there is none. `model_path`: as the server's workers see it; `reference_path`: as this
    process does. `profiles`: its operators are measured."""

    addresses: Sequence[str]
    model_path: str
    other_tenant: str = ""
    reference_path: str = ""
    profiles: bool = False
    main: str = "conformance-main"
    _stubs: dict[str, AllSparkStub] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)
    _turn: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def long(self) -> int:
        """A max_length that takes so long that the request is still running when the next calls arrive."""
        config = json.loads((Path(self.reference_path) / "config.json").read_text())
        return min(30_000, int(config["max_position_embeddings"]))

    def ask(
        self,
        rpc: str,
        message: Any,
        *,
        at: str = "",
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> tuple[Any, dict[str, str]]:
        """Any RPC: its answer and trailing metadata. Successive calls go to successive gateways."""
        address = at or self.addresses[next(self._turn) % len(self.addresses)]
        call = getattr(self._stub(address), rpc)
        answer, done = call.with_call(message, timeout=timeout_s, metadata=tuple(metadata))
        pairs = done.trailing_metadata() or ()
        return answer, {k: v if isinstance(v, str) else v.decode() for k, v in pairs}

    @contextlib.contextmanager
    def later(self, rpc: str, message: Any) -> Iterator[Any]:
        """A call that blocks, begun; what has not been answered by the end of the block is given up."""
        address = self.addresses[next(self._turn) % len(self.addresses)]
        call = getattr(self._stub(address), rpc).future(message, timeout=TIMEOUT_S)
        try:
            yield call
        finally:
            call.cancel()

    def _stub(self, address: str) -> AllSparkStub:
        if address not in self._stubs:
            self._stubs[address] = AllSparkStub(grpc.insecure_channel(address, _OPTIONS))
        return self._stubs[address]

    def answer(self, rpc: str, message: Any, *, at: str = "") -> Any:
        """The answer alone."""
        return self.ask(rpc, message, at=at)[0]

    def status(self, rpc: str, model: str, *, at: str = "") -> int:
        """The AS_STATUS of a call about a model."""
        return int(self.answer(rpc, pb.ModelName(model_name=model), at=at).as_status)

    def needs_other_tenant(self) -> str:
        """The address of another tenant; skips the case where the target has none."""
        if not self.other_tenant:
            pytest.skip("needs --target-other-tenant")
        return self.other_tenant

    def config(self, name: str, **changes: Any) -> pb.ModelStructConfig:
        """How cases build a model, with changes."""
        fields: dict[str, Any] = {
            "model_name": name,
            "model_path": self.model_path,
            "compute_unit": "CPU:0",
            "matmul_precision": "highest",
            "swap_threshold": 0,
            "engine_max_length": MAX_LENGTH,
            "engine_max_batch": 8,
            "cache_span_size": 16,
        }
        lora = changes.pop("lora_names", None)
        config = pb.ModelStructConfig(**(fields | changes))
        if lora is not None:
            config.lora_names.names[:] = lora
        return config

    def build(self, name: str, *, at: str = "", **changes: Any) -> int:
        """The AS_STATUS of a Build."""
        return int(self.answer("BuildModelFromConfigStruct", self.config(name, **changes), at=at).as_status)

    @contextlib.contextmanager
    def model(self, *, start: bool = True, **changes: Any) -> Iterator[str]:
        """A model of its own for one case, built (and started); released in the end, whatever its state."""
        name = f"conformance-{uuid_lib.uuid4().hex[:8]}"
        assert self.build(name, **changes) == OK
        try:
            if start:
                assert self.status("StartModel", name) == OK
            yield name
        finally:
            self.release_model(name)

    @contextlib.contextmanager
    def short_model(self) -> Iterator[str]:
        """A running model whose engine_max_length is MAX_LENGTH; one for all cases that only ask."""
        name = f"{self.main}-short"
        if name not in self._kept:
            assert self.build(name) == OK
            assert self.status("StartModel", name) == OK
            self._kept.add(name)
        yield name

    def release_kept(self) -> None:
        """Releases the models that cases share."""
        for name in (self.main, *self._kept):
            self.release_model(name)

    def release_model(self, name: str) -> None:
        """Ends and releases everything of a model; what is not there is fine."""
        self.status("ReleaseModel", name)

    def submit(self, message: pb.StartRequestRequest, *, at: str = "") -> "Request":
        """Starts a request that must be accepted."""
        limit_s = time.monotonic() + TIMEOUT_S
        while True:
            answer, trailing = self.ask("StartRequest", message, at=at)
            if answer.as_status != DENIED or time.monotonic() > limit_s:
                break
            # A denial is an answer to who comes too early: with a hint when to come again.
            time.sleep(max(100, int(trailing.get("allspark-retry-after-ms", 0))) / 1000)
        assert answer.as_status == OK, trailing
        return Request(self, message.model_name, answer.uuid, at)

    def start(self, prompt: Sequence[int], *, model: str = "", at: str = "", **config: Any) -> "Request":
        """Starts a request; the defaults are those of `request`."""
        return self.submit(request(model or self.main, prompt, **config), at=at)

    def generate(self, prompt: Sequence[int], *, model: str = "", **config: Any) -> list[int]:
        """The tokens of a request that finishes."""
        return self.start(prompt, model=model, **config).take_all()

    def refused(self, message: pb.StartRequestRequest) -> int:
        """The AS_STATUS of a StartRequest that should be refused; its uuid must come back."""
        answer, trailing = self.ask("StartRequest", message)
        if answer.as_status == OK:
            Request(self, message.model_name, answer.uuid).release()
        else:
            assert answer.uuid == message.config.uuid
            assert trailing.get("allspark-reason"), "a refusal says why"
        return int(answer.as_status)

    def stat(self, model: str = "") -> pb.AsEngineStat:
        """The figures of a model."""
        answer: pb.AsEngineStat = self.answer("GetAsEngineStat", pb.ModelName(model_name=model or self.main))
        return answer


@dataclass
class Request:
    """A request that the server accepted."""

    server: Server
    model: str
    uuid: str
    at: str = ""

    @property
    def key(self) -> pb.UUID:
        return pb.UUID(uuid=self.uuid)

    def get(self) -> pb.GeneratedElements:
        """One Get."""
        return self.server.answer("Get", self.key, at=self.at)

    def get_no_wait(self) -> pb.GeneratedElements:
        """One GetNoWait."""
        return self.server.answer("GetNoWait", self.key, at=self.at)

    def status(self) -> int:
        """One GenerateStatus."""
        return int(self.server.answer("GenerateStatus", self.key, at=self.at).status)

    def length(self) -> int:
        """One GeneratedLength."""
        return int(self.server.answer("GeneratedLength", self.key, at=self.at).len)

    def finish_reason(self) -> str:
        """Why it ended, from the trailing metadata."""
        return self.server.ask("GenerateStatus", self.key, at=self.at)[1].get("allspark-finish-reason", "")

    def end(self, rpc: str, **changes: str) -> pb.StartRequestResponse:
        """StopRequest, ReleaseRequest or SyncRequest."""
        fields = {"model_name": self.model, "uuid": self.uuid} | changes
        return self.server.answer(rpc, pb.StopRequestRequest(**fields), at=self.at)

    def stop(self) -> int:
        return int(self.end("StopRequest").as_status)

    def release(self) -> int:
        return int(self.end("ReleaseRequest").as_status)

    def sync(self) -> int:
        return int(self.end("SyncRequest").as_status)

    def drain(self) -> list[int]:
        """Every token that is still to come, by Get."""
        tokens: list[int] = []
        while ids := list(self.get().ids_from_generate):
            tokens += ids
        return tokens

    def take_all(self, end: int = FINISHED) -> list[int]:
        """Waits for the end, reads everything, releases."""
        tokens = self.drain()
        assert self.status() == end, self.finish_reason()
        assert self.length() == len(tokens)
        assert self.release() == OK
        return tokens

    def elements(self) -> pb.GeneratedElements:
        """Everything of a request that delivers at its end, as one message; nothing is left after it."""
        assert self.sync() == OK
        whole = pb.GeneratedElements()
        whole.MergeFrom(self.get_no_wait())
        rest = self.get()  # waits until the answer before it is known to have arrived, at any gateway
        assert not rest.ids_from_generate and not rest.tensors_from_model_inference.tensor_map
        return whole


def request(model: str, prompt: Sequence[int], *, new: int = 8, **config: Any) -> pb.StartRequestRequest:
    """A greedy request for `new` tokens. `config` sets fields of GenerateConfig; `stop_words_ids` and
    `bad_words_ids` take lists of words; `tensors` (name -> Tensor) adds inputs; `mm_type` and `infer_type`
    are those of the message."""
    message = pb.StartRequestRequest(model_name=model)
    for name in ("infer_type", "mm_type"):
        if name in config:
            setattr(message, name, config.pop(name))
    message.inputs.tensor_map["input_ids"].CopyFrom(tensor([list(prompt)]))
    for name, value in config.pop("tensors", {}).items():
        message.inputs.tensor_map[name].CopyFrom(value)
    message.config.CopyFrom(generate_config(uuid=uuid_lib.uuid4().hex, max_length=len(prompt) + new))
    message.config.MergeFrom(generate_config(**config))
    for name in ("max_length", "uuid", "eos_token_id"):  # a zero is meant, too
        if name in config:
            setattr(message.config, name, config[name])
    return message


def generate_config(**fields: Any) -> pb.GenerateConfig:
    """A GenerateConfig without an eos token unless one is given."""
    config = pb.GenerateConfig(eos_token_id=-1)
    for name, value in fields.items():
        if name in ("stop_words_ids", "bad_words_ids"):
            for word in value:
                getattr(config, name).ids.add(word=word)
        elif name in ("response_format", "vocab"):
            getattr(config, name).update(value)
        elif name.endswith("_arr"):
            getattr(config, name).extend(value)
        else:
            setattr(config, name, value)
    return config


_DTYPES = {
    pb.INT64: "<i8",
    pb.INT32: "<i4",
    pb.FLOAT32: "<f4",
    pb.FLOAT16: "<f2",
    pb.INT8: "i1",
    pb.UINT8: "u1",
}


def tensor(values: Any, data_type: int = pb.INT64, **fields: Any) -> pb.Tensor:
    """A dense tensor as upstream's client sends it."""
    array = np.asarray(values, _DTYPES[data_type])
    made = pb.Tensor(name="tensor", data_type=data_type, data=array.tobytes())
    made.shape.dims[:] = array.shape
    made.device_type.dev_type = pb.CPU
    for name, value in fields.items():
        if name == "dims":
            made.shape.dims[:] = value
        elif name == "dev_type":
            made.device_type.dev_type = value
        else:
            setattr(made, name, value)
    return made


def text_tensor(text: str) -> pb.Tensor:
    """A STRING tensor: UTF-8, dims [1]."""
    made = pb.Tensor(data_type=pb.STRING, data=text.encode())
    made.shape.dims[:] = [1]
    return made


def array_of(made: pb.Tensor) -> Any:
    """The values of a tensor that the server sent."""
    return np.frombuffer(made.data, _DTYPES[made.data_type]).reshape(tuple(made.shape.dims))
