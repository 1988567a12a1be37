"""Sections 1.4.2 to 1.4.8 and 1.4.14 to 1.4.16: the calls about models and about the service."""

import re

import pytest
from allspark_proto import allspark_service_pb2 as pb

from tests.conformance.server import DENIED, FINISHED, INVALID, IO, OK, PARAM, RUNTIME, Server, request
from tests.conformance.suite import case

PROMPT = [5, 6, 7]
STATUS = "AsStatus.as_status"


@case("1.4.2", STATUS)
def StartModel_again_disturbs_nothing(s: Server) -> None:
    with s.model() as name:
        live = s.start(PROMPT, model=name, new=100)
        assert s.status("StartModel", name) == OK
        assert len(live.take_all()) == 100


@case("1.4.2", "AsEngineStat.total_generated_token", "AsEngineStat.total_prefill_token")
def warm_up_is_not_counted(s: Server) -> None:
    with s.model() as name:
        stat = s.stat(name)
        assert (stat.total_generated_token, stat.total_prefill_token) == (0, 0)


@case("1.4.3", STATUS)
def StopModel_waits_for_what_runs(s: Server) -> None:
    with s.model() as name:
        live = s.start(PROMPT, model=name, new=400)
        assert s.status("StopModel", name) == RUNTIME
        assert live.status() == FINISHED
        assert len(live.take_all()) == 400


@case("1.4.3", STATUS, "StartRequestResponse.as_status")
def after_StopModel_the_request_calls_work(s: Server) -> None:
    with s.model() as name:
        left = [s.start(PROMPT, model=name) for _ in range(3)]
        assert s.status("StopModel", name) == RUNTIME
        assert [left[0].stop(), left[1].sync(), left[2].release()] == [OK] * 3
        assert [left[0].release(), left[1].release()] == [OK] * 2
        assert s.status("StopModel", name) == OK
        assert s.refused(request(name, PROMPT)) == DENIED
        assert s.status("StartModel", name) == OK
        assert len(s.generate(PROMPT, model=name)) == 8


@case("1.4.4", STATUS)
def ReleaseModel_of_a_running_model_stops_it_first(s: Server) -> None:
    with s.model() as name:
        live = s.start(PROMPT, model=name, new=400)
        assert s.status("ReleaseModel", name) == OK
        assert s.refused(request(name, PROMPT)) == PARAM
        assert len(live.take_all()) == 400
        assert s.build(name) == OK, "the name is free again"


@case("1.4.5", STATUS, "ModelStructConfig.swap_threshold")
def Unload_and_Reload_statuses(s: Server) -> None:
    assert s.status("UnloadModelFromDeviceMemory", "conformance-nobody") == PARAM
    assert s.status("ReloadModelToDeviceMemory", "conformance-nobody") == RUNTIME
    with s.model(swap_threshold=0) as name:
        assert s.status("ReloadModelToDeviceMemory", name) == OK, "it is loaded"
        assert s.status("UnloadModelFromDeviceMemory", name) == OK
        assert s.refused(request(name, PROMPT)) == INVALID
        assert s.status("ReloadModelToDeviceMemory", name) == OK
    with s.model(swap_threshold=-1, engine_max_length=s.long) as name:
        live = s.start(PROMPT, model=name, max_length=s.long)
        assert s.status("UnloadModelFromDeviceMemory", name) == DENIED, "live requests come first"
        assert live.release() == OK
        assert s.status("UnloadModelFromDeviceMemory", name) == INVALID


@case("1.4.6", "ModelInfo.model_info", "ModelName.model_name")
def GetModelInformation_has_the_layout_of_upstream(s: Server) -> None:
    text = s.answer("GetModelInformation", pb.ModelName(model_name=s.main)).model_info
    facts = r"device: (CPU|CUDA), dtype: INT64, shape: \[0, 0\], addr: \(nil\), val: \(null\)"
    tensor = r"    \{ name: %s, " + facts + r" \}\n"
    layout = (
        r"Model Type : [A-Za-z0-9_.-]+\n"
        r"Model Inputs : \n" + tensor % "input_ids" + tensor % "attention_mask"
        + r"Model Outputs:\n" + tensor % "generated_ids"
    )  # fmt: skip
    assert re.fullmatch(layout, text)


@case("1.4.7", "FileInformationRequest.model_path", "FileInformationRequest.param_path",
      "FileInformationResponse.create_version_graph", "FileInformationResponse.create_version_param",
      "FileInformationResponse.current_version_engine")  # fmt: skip
def GetFileInformation_tells_three_versions(s: Server) -> None:
    asked = pb.FileInformationRequest(model_path=s.model_path, param_path=s.model_path)
    answer = s.answer("GetFileInformation", asked)
    versions = (answer.create_version_graph, answer.create_version_param, answer.current_version_engine)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", v) for v in versions)
    alone = s.answer("GetFileInformation", pb.FileInformationRequest(model_path=s.model_path))
    assert alone.create_version_param == alone.create_version_graph == answer.create_version_graph


@case("1.4.7", "FileInformationRequest.model_path", "FileInformationRequest.param_path",
      "FileInformationResponse.create_version_graph", "FileInformationResponse.create_version_param",
      "FileInformationResponse.current_version_engine")  # fmt: skip
def GetFileInformation_of_what_is_no_model(s: Server) -> None:
    for model, param in (("missing", ""), ("/etc/passwd", ""), ("", ""), (s.model_path, "/etc/passwd")):
        asked = pb.FileInformationRequest(model_path=model, param_path=param)
        answer, trailing = s.ask("GetFileInformation", asked)
        assert (answer.create_version_graph, answer.create_version_param) == ("", "")
        assert re.fullmatch(r"\d+\.\d+\.\d+", answer.current_version_engine)
        assert trailing.get("allspark-reason")


@case("1.4.14", "VersionInfo.version_info")
def GetVersionFull_has_two_parts(s: Server) -> None:
    text = s.answer("GetVersionFull", pb.Empty()).version_info
    assert re.fullmatch(r"\d+\.\d+\.\d+/\(GitSha1:[0-9a-f]+\)", text)


_RULE = "-" * 95 + "\n"
_HEAD = r"rank {6}opname {14}count {5}min_ms {4}max_ms {4}ave_ms {4}total_ms {7}percentage\n"
_ROW = r"(?:0 {9}[A-Za-z]\S{0,18} +\d+ +(?:\d+\.\d\d +){5}\n)"
_TABLE = r"\*\*\* %s \*\*\*\n" + _RULE + _HEAD + _RULE + _ROW + "*" + _RULE + r"\n"
_BLOCK = r"\*{19}\n\* (?:prefill|decode) worker\n\*{19}\n\n" + "".join(
    _TABLE % tag for tag in ("forward", "reshape", "alloc")
)


@case("2.6.4, 9 #17", "OpProfilingInfo.op_profiling_info")
def GetOpProfilingInfo_has_the_table_of_upstream_and_reading_clears_it(s: Server) -> None:
    asked = pb.ModelName
    with s.model() as name:
        s.generate(PROMPT, model=name, new=20)
        text = s.answer("GetOpProfilingInfo", asked(model_name=name)).op_profiling_info
        again = s.answer("GetOpProfilingInfo", asked(model_name=name)).op_profiling_info
    if not text and not s.profiles:
        pytest.skip("the target does not profile, as far as --target-profiles says")
    assert re.fullmatch(f"(?:{_BLOCK})+", text)
    rows = [line for line in text.splitlines() if line.startswith("0")]
    assert rows and {len(row) for row in rows} == {95}
    table = text[text.index("* decode worker") :]
    rows = [row for row in table[: table.index("*** reshape")].splitlines() if row.startswith("0")]
    shares = [float(row[85:]) for row in rows]
    assert shares == sorted(shares, reverse=True) and abs(sum(shares) - 100) < 1
    assert again == ""


@case("1.4.15", "RankId.rank_id")
def GetRankId_is_zero(s: Server) -> None:
    assert s.answer("GetRankId", pb.Empty()).rank_id == 0


@case("1.4.15, 9 #18", "RankId.rank_id")
def GetRankNums_is_one_once_the_tenant_has_built_a_model(s: Server) -> None:
    assert s.answer("GetRankNums", pb.Empty()).rank_id == 1
    other = s.needs_other_tenant()
    s.answer("ShutdownService", pb.Empty(), at=other)
    assert s.answer("GetRankNums", pb.Empty(), at=other).rank_id == 0
    name = "conformance-ranks"
    assert s.build(name, at=other, model_path="missing") == IO
    assert s.answer("GetRankNums", pb.Empty(), at=other).rank_id == 0, "it was not built"
    assert s.build(name, at=other) == OK
    assert s.answer("GetRankNums", pb.Empty(), at=other).rank_id == 1
    assert s.status("ReleaseModel", name, at=other) == OK
    assert s.answer("GetRankNums", pb.Empty(), at=other).rank_id == 0


@case("1.4.16", STATUS)
def ShutdownService_leaves_a_model_that_another_tenant_has_built_too(s: Server) -> None:
    other = s.needs_other_tenant()
    with s.model() as name:
        assert s.build(name, at=other) == OK
        assert s.answer("ShutdownService", pb.Empty(), at=other).as_status == OK
        assert len(s.generate(PROMPT, model=name)) == 8


@case("1.4.16, 9 #19", STATUS)
def ShutdownService_ends_what_its_caller_owns_and_nothing_else(s: Server) -> None:
    other = s.needs_other_tenant()
    name = "conformance-owned"
    assert s.build(name, at=other) == OK
    theirs = s.start(PROMPT, max_length=0, at=other)
    ours = s.start(PROMPT, new=200)
    assert s.answer("ShutdownService", pb.Empty(), at=other).as_status == OK
    assert theirs.get().empty == 1
    assert not s.answer("GetModelInformation", pb.ModelName(model_name=name)).model_info
    assert len(ours.take_all()) == 200
    assert s.answer("ShutdownService", pb.Empty(), at=other).as_status == OK, "again"
    assert len(s.generate(PROMPT)) == 8
