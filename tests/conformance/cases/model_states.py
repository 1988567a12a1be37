"""Section 1.2: every cell of the state table of models, and the state that it leads to."""

import time
from collections.abc import Callable

from allspark_proto import allspark_service_pb2 as pb

from tests.conformance.server import DENIED, INVALID, OK, PARAM, RUNTIME, Server, request
from tests.conformance.suite import add, case

STATUS = ("AsStatus.as_status", "ModelName.model_name")


def _build(s: Server, name: str) -> None:
    assert s.build(name) == OK


def _start(s: Server, name: str) -> None:
    _build(s, name)
    assert s.status("StartModel", name) == OK


def _unload(s: Server, name: str) -> None:
    _build(s, name)
    assert s.status("UnloadModelFromDeviceMemory", name) == OK


def _stop(s: Server, name: str) -> None:
    _start(s, name)
    assert s.status("StopModel", name) == OK


ENTER: dict[str, Callable[[Server, str], None]] = {
    "absent": lambda s, name: None,
    "BUILT": _build,
    "RUNNING": _start,
    "UNLOADED": _unload,
    "STOPPED": _stop,
}
EVENT: dict[str, Callable[[Server, str], int]] = {
    "Build": lambda s, name: s.build(name),
    "Build-other": lambda s, name: s.build(name, engine_max_length=512),
    "Start": lambda s, name: s.status("StartModel", name),
    "StartRequest": lambda s, name: s.refused(request(name, [5, 6, 7])),
    "Unload": lambda s, name: s.status("UnloadModelFromDeviceMemory", name),
    "Reload": lambda s, name: s.status("ReloadModelToDeviceMemory", name),
    "Stop": lambda s, name: s.status("StopModel", name),
    "Release": lambda s, name: s.status("ReleaseModel", name),
}
TABLE = """
absent    Build         0  BUILT
absent    Start         8  absent
absent    StartRequest  2  absent
absent    Unload        2  absent
absent    Reload        5  absent
absent    Stop          8  absent
absent    Release       8  absent
BUILT     Build         0  BUILT
BUILT     Build-other   0  BUILT
BUILT     Start         0  RUNNING
BUILT     StartRequest  8  BUILT
BUILT     Unload        0  UNLOADED
BUILT     Reload        0  BUILT
BUILT     Stop          0  BUILT
BUILT     Release       0  absent
RUNNING   Build         0  RUNNING
RUNNING   Build-other   8  RUNNING
RUNNING   Start         0  RUNNING
RUNNING   StartRequest  0  RUNNING
RUNNING   Unload        0  UNLOADED
RUNNING   Reload        0  RUNNING
RUNNING   Stop          0  STOPPED
RUNNING   Release       0  absent
UNLOADED  Build         0  UNLOADED
UNLOADED  Start         8  UNLOADED
UNLOADED  StartRequest  8  UNLOADED
UNLOADED  Unload        0  UNLOADED
UNLOADED  Reload        0  BUILT
UNLOADED  Stop          0  UNLOADED
UNLOADED  Release       0  absent
STOPPED   Build         0  STOPPED
STOPPED   Build-other   0  BUILT
STOPPED   Start         0  RUNNING
STOPPED   StartRequest  12 STOPPED
STOPPED   Unload        0  UNLOADED
STOPPED   Reload        0  STOPPED
STOPPED   Stop          0  STOPPED
STOPPED   Release       0  absent
"""


def state_of(s: Server, name: str) -> str:
    """The state as a client can tell it; ends with a StartModel, which only a last look can afford."""
    if not s.answer("GetModelInformation", pb.ModelName(model_name=name)).model_info:
        return "absent"
    status = s.refused(request(name, [5, 6, 7]))
    if status != INVALID:
        return {OK: "RUNNING", DENIED: "STOPPED"}[status]
    return "UNLOADED" if s.status("StartModel", name) == INVALID else "BUILT"


def _cell(state: str, event: str, status: int, after: str) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        name = f"conformance-{state}-{event}"
        s.release_model(name)  # of a run that was cut off
        ENTER[state](s, name)
        try:
            assert EVENT[event](s, name) == status
            assert state_of(s, name) == after
        finally:
            s.release_model(name)

    return run


for _line in filter(None, TABLE.splitlines()):
    _state, _event, _status, _after = _line.split()
    add("1.2", f"{_state} {_event} {_status} {_after}", STATUS, _cell(_state, _event, int(_status), _after))


@case("1.2", *STATUS)
def running_Unload_12_while_a_request_lives(s: Server) -> None:
    with s.model(engine_max_length=s.long) as name:
        live = s.start([5, 6], model=name, max_length=s.long)
        assert s.status("UnloadModelFromDeviceMemory", name) == DENIED
        assert live.stop() == OK
        assert s.status("UnloadModelFromDeviceMemory", name) == OK, "results do not hold the weights"
        assert live.release() == OK


@case("1.2", *STATUS)
def running_Stop_5_with_unreleased_results(s: Server) -> None:
    with s.model() as name:
        left = s.start([5, 6], model=name)
        assert left.sync() == OK
        assert s.status("StopModel", name) == RUNTIME
        assert state_of(s, name) == "STOPPED"
        assert len(left.take_all()) == 8, "results stay readable and releasable"


@case("1.2", *STATUS)
def stopping_denies_everything_and_Release_waits(s: Server) -> None:
    with s.model(engine_max_length=s.long) as name:
        live = s.start([5, 6], model=name, max_length=s.long)
        with s.later("StopModel", pb.ModelName(model_name=name)):
            deadline = time.monotonic() + 60
            while s.refused(request(name, [5])) != DENIED:
                assert time.monotonic() < deadline, "StopModel did not begin"
            for event in ("Build", "Build-other", "Start", "StartRequest", "Unload", "Reload", "Stop"):
                assert EVENT[event](s, name) == DENIED, event
            assert s.stat(name).running_request == 1, "figures stay live"
            with s.later("ReleaseModel", pb.ModelName(model_name=name)) as released:
                assert live.stop() == OK
                assert released.result().as_status == OK
        assert live.release() == OK
        assert state_of(s, name) == "absent"


@case("1.2, 9 #17", "AsEngineStat.model_name", "ModelInfo.model_info", "OpProfilingInfo.op_profiling_info")
def absent_has_zeros_and_no_text(s: Server) -> None:
    nobody = pb.ModelName(model_name="conformance-nobody")
    assert s.stat("conformance-nobody") == pb.AsEngineStat(model_name="conformance-nobody")
    assert s.answer("GetModelInformation", nobody).model_info == ""
    assert s.answer("GetOpProfilingInfo", nobody).op_profiling_info == ""


@case("1.2", "AsEngineStat.total_span", "ModelInfo.model_info", "OpProfilingInfo.op_profiling_info")
def built_and_unloaded_have_zeros_and_text(s: Server) -> None:
    with s.model(start=False) as name:
        for _ in range(2):
            assert s.stat(name) == pb.AsEngineStat(model_name=name)
            assert s.answer("GetModelInformation", pb.ModelName(model_name=name)).model_info
            assert s.answer("GetOpProfilingInfo", pb.ModelName(model_name=name)).op_profiling_info == ""
            assert s.status("UnloadModelFromDeviceMemory", name) == OK


@case("1.2", "AsEngineStat.total_generated_token", "AsEngineStat.total_prefill_token")
def stopped_keeps_the_last_values(s: Server) -> None:
    with s.model() as name:
        s.generate([5, 6, 7], model=name)
        before = s.stat(name)
        assert before.total_span > 0 and before.total_generated_token >= 8
        assert s.status("StopModel", name) == OK
        after = s.stat(name)
        assert (after.total_generated_token, after.total_prefill_token) == (
            before.total_generated_token, before.total_prefill_token,
        )  # fmt: skip
        assert after.running_request == after.pendding_request == 0


@case("1.2", *STATUS)
def unload_and_reload_return_to_running_with_the_same_tokens(s: Server) -> None:
    with s.model() as name:
        before = s.generate([5, 6, 7], model=name)
        assert s.status("UnloadModelFromDeviceMemory", name) == OK
        assert s.refused(request(name, [5, 6, 7])) == INVALID
        assert s.stat(name) == pb.AsEngineStat(model_name=name)
        assert s.status("ReloadModelToDeviceMemory", name) == OK
        assert s.generate([5, 6, 7], model=name) == before


@case("1.2", "ModelName.model_name")
def a_released_name_is_unknown(s: Server) -> None:
    with s.model() as name:
        assert s.status("ReleaseModel", name) == OK
        assert s.refused(request(name, [5, 6, 7])) == PARAM
