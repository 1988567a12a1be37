"""Every cell of the model state table (spec 1.2), through gRPC: what is answered, and where it leads."""

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from allspark.client import Client, GenerateOptions
from allspark.client.options import start_request_message
from allspark.launcher import Fleet
from allspark_bus.broker_client import BrokerClient
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2

OK, PARAM, RUNTIME, INVALID, DENIED = 0, 2, 5, 8, 12
STATES = ("absent", "built", "running", "unloaded", "stopping", "stopped")
EVENTS = ("build", "build other", "start", "request", "unload", "reload", "stop", "release")
#: state -> for each event: status, next state
TABLE: dict[str, list[tuple[int, str]]] = {
    "absent": [
        (OK, "built"), (OK, "built"), (INVALID, "absent"), (PARAM, "absent"),
        (PARAM, "absent"), (RUNTIME, "absent"), (INVALID, "absent"), (INVALID, "absent"),
    ],
    "built": [
        (OK, "built"), (OK, "built"), (OK, "running"), (INVALID, "built"),
        (OK, "unloaded"), (OK, "built"), (OK, "built"), (OK, "absent"),
    ],
    "running": [
        (OK, "running"), (INVALID, "running"), (OK, "running"), (OK, "running"),
        (OK, "unloaded"), (OK, "running"), (OK, "stopped"), (OK, "absent"),
    ],
    "unloaded": [
        (OK, "unloaded"), (OK, "built"), (INVALID, "unloaded"), (INVALID, "unloaded"),
        (OK, "unloaded"), (OK, "running"), (OK, "unloaded"), (OK, "absent"),
    ],
    "stopping": [
        (DENIED, "stopping"), (DENIED, "stopping"), (DENIED, "stopping"), (DENIED, "stopping"),
        (DENIED, "stopping"), (DENIED, "stopping"), (DENIED, "stopping"), (OK, "absent"),
    ],
    "stopped": [
        (OK, "stopped"), (OK, "built"), (OK, "running"), (DENIED, "stopped"),
        (OK, "unloaded"), (OK, "stopped"), (OK, "stopped"), (OK, "absent"),
    ],
}  # fmt: skip


class Model:
    """A model of its own for one cell."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.name = f"m-{uuid.uuid4().hex[:8]}"
        self.live = uuid.uuid4().hex
        self._stopping: threading.Thread | None = None

    def call(self, rpc: str, message: Any) -> int:
        reply, trailing = self.client.call(rpc, message)
        assert not reply.as_status or trailing["allspark-reason"], "every refusal has a reason"
        return int(reply.as_status)

    def do(self, event: str) -> int:
        """One RPC; its status."""
        if event in ("build", "build other"):
            batch = 7 if event == "build other" else 0
            config = pb.ModelStructConfig(
                model_name=self.name, model_path="slow.json", engine_max_batch=batch, swap_threshold=0
            )
            return self.call("BuildModelFromConfigStruct", config)
        if event == "request":
            return self.submit(uuid.uuid4().hex, 1)
        rpc = {
            "start": "StartModel", "unload": "UnloadModelFromDeviceMemory", "stop": "StopModel",
            "reload": "ReloadModelToDeviceMemory", "release": "ReleaseModel",
        }[event]  # fmt: skip
        return self.call(rpc, pb.ModelName(model_name=self.name))

    def submit(self, uid: str, new: int) -> int:
        return self.call(
            "StartRequest", start_request_message(self.name, [1, 2], GenerateOptions(max_new_tokens=new), uid)
        )

    def reach(self, state: str) -> None:
        """Bring the new model into a state."""
        path = {
            "absent": [], "built": ["build"], "running": ["build", "start"],
            "unloaded": ["build", "start", "unload"], "stopping": ["build", "start"],
            "stopped": ["build", "start", "stop"],
        }[state]  # fmt: skip
        assert [self.do(event) for event in path] == [OK] * len(path)
        if state == "stopping":
            self._begin_to_stop()

    def _begin_to_stop(self) -> None:
        """A request that goes on keeps StopModel waiting; a probe tells when the fleet has begun to drain."""
        assert self.submit(self.live, 400) == OK
        self._stopping = threading.Thread(target=lambda: self.do("stop"))
        self._stopping.start()
        while self.do("start") == OK:
            pass  # polling: until StopModel, sent by the other thread, has arrived

    def end(self) -> None:
        """Leave nothing behind."""
        for rpc in ("StopRequest", "ReleaseRequest"):
            self.client.call(rpc, pb.StopRequestRequest(uuid=self.live))
        if self._stopping is not None:
            self._stopping.join()
        self.client.call("ReleaseModel", pb.ModelName(model_name=self.name))


@pytest.fixture
def client(scripted_fleet: Fleet) -> Iterator[Client]:
    root = Path(scripted_fleet.options.model_roots[0])
    (root / "slow.json").write_text('{"max_length": 512, "max_batch": 16, "step_s": 0.1}')
    with Client(scripted_fleet.addresses[0]) as client:
        yield client


@pytest.fixture
def model(client: Client) -> Iterator[Model]:
    model = Model(client)
    yield model
    model.end()


def states_of(fleet: Fleet) -> dict[str, str]:
    """State of every model, as `allspark status` shows it."""

    async def ask() -> dict[str, str]:
        broker = BrokerClient(fleet.frontends)
        try:
            envelope = fleet_pb2.Envelope(get_fleet_status=fleet_pb2.GetFleetStatus())
            status = (await broker.call(envelope, 60.0)).fleet_status
        finally:
            await broker.close()
        return {m.name: m.state for m in status.models}

    return asyncio.run(ask())


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_cell(scripted_fleet: Fleet, model: Model, state: str, event: str) -> None:
    expected_status, expected_state = TABLE[state][EVENTS.index(event)]
    model.reach(state)
    if event == "release" and state == "stopping":
        # Release waits for the drain: the request that goes on is ended, as its owner may do at any time.
        end = pb.StopRequestRequest(uuid=model.live)
        threading.Timer(0.1, lambda: model.call("StopRequest", end)).start()
    assert model.do(event) == expected_status
    assert states_of(scripted_fleet).get(model.name, "absent") == expected_state


def test_statistics_information_and_profile_in_every_state(client: Client) -> None:
    def figures(model: Model) -> tuple[int, bool, str]:
        name = pb.ModelName(model_name=model.name)
        stat = client.stat(model.name)
        assert stat.model_name == model.name
        profile = client.call("GetOpProfilingInfo", name)[0].op_profiling_info
        info = client.call("GetModelInformation", name)[0].model_info
        return stat.total_generated_token, bool(info), profile

    model = Model(client)
    try:
        assert figures(model) == (0, False, "")
        model.do("build")
        assert figures(model) == (0, True, "")
        model.do("start")
        assert model.submit(model.live, 5) == OK
        client.sync(model.live)
        assert figures(model) == (5, True, "")
        assert model.do("stop") == RUNTIME, "stopped, but its result is not released"
        assert figures(model) == (5, True, ""), "last values"
        assert model.do("unload") == OK
        assert figures(model) == (0, True, "")
    finally:
        model.end()


def test_unload_is_denied_while_a_request_lives_and_while_swapping_is_off(client: Client) -> None:
    model = Model(client)
    try:
        model.reach("running")
        assert model.submit(model.live, 400) == OK
        assert model.do("unload") == DENIED
        assert client.call("StopRequest", pb.StopRequestRequest(uuid=model.live))[0].as_status == OK
        assert model.do("unload") == OK, "an ended request is no live one, released or not"
    finally:
        model.end()
    config = pb.ModelStructConfig(model_name=model.name, model_path="slow.json", swap_threshold=-1)
    assert model.call("BuildModelFromConfigStruct", config) == OK
    assert model.do("unload") == INVALID
    config.swap_threshold = -2
    assert model.call("BuildModelFromConfigStruct", config) == PARAM
    model.end()


def test_a_request_of_an_unloaded_model_runs_after_reload(client: Client) -> None:
    model = Model(client)
    try:
        model.reach("unloaded")
        assert model.do("request") == INVALID
        assert model.do("reload") == OK
        assert model.submit(model.live, 3) == OK
        assert len(client.attach(model.name, model.live).result()) == 3
    finally:
        model.end()


def test_shutdown_service_of_a_client_leaves_the_models_of_the_operator(scripted_fleet: Fleet) -> None:
    """Model "m" was loaded as `allspark up` loads models; the client on TCP owns only what it built."""
    with Client(scripted_fleet.addresses[0]) as client:
        model = Model(client)
        model.reach("running")
        assert client.call("GetRankNums", pb.Empty())[0].rank_id == 1
        client.build_model("m", str(scripted_fleet.options.model_roots[0] / "m.json"))
        assert client.call("ShutdownService", pb.Empty())[0].as_status == OK
        assert client.call("GetRankNums", pb.Empty())[0].rank_id == 0
        assert set(states_of(scripted_fleet)) == {"m"}, "what the client built with another owner stays"
        assert client.submit("m", [1, 2], GenerateOptions(max_new_tokens=3)).result()
        config = pb.ModelStructConfig(model_name="x", model_path="m.json")
        reply, trailing = client.call(
            "BuildModelFromConfigStruct", config, metadata=[("allspark-owner", "somebody")]
        )
        assert (reply.as_status, "only value is operator" in trailing["allspark-reason"]) == (PARAM, True)
