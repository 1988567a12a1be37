"""The service descriptor equals the interface listing: every method, field name, number, type, enum value.

The listing is the customer's text; where it is not at hand (it is not part of this repository) its facts
below are what the descriptor is compared with.
"""

from allspark_proto import allspark_service_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor as F

S = pb.DESCRIPTOR

METHODS = """
BuildModelFromConfigStruct ModelStructConfig AsStatus
ReloadModelToDeviceMemory ModelName AsStatus
UnloadModelFromDeviceMemory ModelName AsStatus
GetModelInformation ModelName ModelInfo
GetFileInformation FileInformationRequest FileInformationResponse
StartModel ModelName AsStatus
StopModel ModelName AsStatus
ReleaseModel ModelName AsStatus
StartRequest StartRequestRequest StartRequestResponse
StopRequest StopRequestRequest StartRequestResponse
ReleaseRequest StopRequestRequest StartRequestResponse
SyncRequest StopRequestRequest StartRequestResponse
GetAsEngineStat ModelName AsEngineStat
GetVersionFull Empty VersionInfo
GetOpProfilingInfo ModelName OpProfilingInfo
GetRankId Empty RankId
GetRankNums Empty RankId
ShutdownService Empty AsStatus
GenerateStatus UUID GenerateRequestStatus
GeneratedLength UUID GenerateLen
Get UUID GeneratedElements
GetNoWait UUID GeneratedElements
"""

MESSAGES = """
AsStatus: AS_STATUS as_status = 1
BadWordIds: repeated BadWordIds.Array ids = 1
BadWordIds.Array: repeated int32 word = 1
DeviceType: DEVICE_TYPE dev_type = 1
Empty:
GenerateRequestStatus: GENERATE_STATUS status = 1
GenerateLen: int64 len = 1
GenerateConfig: BadWordIds bad_words_ids = 1; StopWordIds stop_words_ids = 2; bool do_sample = 3; bool early_stopping = 4; bool async = 5; int32 async_token_num = 6; int32 first_token_num = 7; string uuid = 8; int32 num_beams = 9; int32 num_return_sequences = 10; float temperature = 11; float top_p = 12; float repetition_penalty = 13; float length_penalty = 14; float presence_penalty = 15; bool suppress_repetition_in_generation = 16; int32 min_length = 17; int32 max_length = 18; int32 no_repeat_ngram_size = 19; int32 eos_token_id = 20; int32 top_k = 21; int32 input_len = 22; int64 seed = 23; bool loop_context = 24; repeated int32 top_k_arr = 25; repeated float top_p_arr = 26; repeated int64 seed_arr = 27; bool probe_only = 28; string lora_name = 29; map<string, string> response_format = 30; map<string, int32> vocab = 31; VocabType vocab_type = 32
GeneratedElements: int32 empty = 1; repeated int64 ids_from_generate = 2; TensorMap tensors_from_model_inference = 3
LoraNames: repeated string names = 1
ModelName: string model_name = 1
RankId: int32 rank_id = 1
StartRequestResponse: AS_STATUS as_status = 1; string uuid = 2
StartRequestRequest: string model_name = 1; RequestInferType infer_type = 2; RequestMMType mm_type = 3; TensorMap inputs = 4; GenerateConfig config = 6
StopRequestRequest: string model_name = 1; string uuid = 2
StopWordIds: repeated StopWordIds.Array ids = 1
StopWordIds.Array: repeated int64 word = 1
Tensor: string name = 1; Tensor.Shape shape = 2; DeviceType device_type = 3; DATA_TYPE data_type = 4; DATA_MODE data_mode = 5; bytes data = 6
Tensor.Shape: repeated int32 dims = 1
TensorListMap: map<string, TensorListMap.Array> tensor_list_map = 1
TensorListMap.Array: repeated Tensor tensor = 1
TensorMap: map<string, Tensor> tensor_map = 1
UUID: string uuid = 1
ModelStructConfig: string model_name = 1; string model_path = 2; string weights_path = 3; string compute_unit = 4; string matmul_precision = 5; bool is_lora_cfg = 6; int64 swap_threshold = 7; int32 engine_max_length = 8; int32 engine_max_batch = 9; LoraNames lora_names = 10; int32 cache_span_size = 11; int32 cache_span_num_init = 12; int32 cache_span_num_grow = 13; AsCacheMode cache_mode = 14; bool enable_prefix_cache = 15; int32 prefix_cache_ttl = 16; AsMHAPrefill prefill_mode = 17; bool text_graph = 18; int32 num_threads = 19
ModelInfo: string model_info = 1
FileInformationRequest: string model_path = 1; string param_path = 2
FileInformationResponse: string create_version_graph = 1; string create_version_param = 2; string current_version_engine = 3
AsEngineStat: string model_name = 1; int64 total_span = 2; int64 used_span = 3; int64 free_span = 4; int64 free_token = 5; int64 span_size = 6; int32 pendding_request = 7; int32 running_request = 8; int64 total_device_memory_pool_size = 9; int64 used_device_memory_pool_size = 10; int64 total_generated_token = 11; int64 total_prefill_token = 12; float generate_token_persec = 13; float process_token_persec = 14; int64 prefix_cache_hit_token = 15; int64 prefix_cache_miss_token = 16; float prefix_cache_hit_rate = 17; float prefix_cache_miss_rate = 18
VersionInfo: string version_info = 1
OpProfilingInfo: string op_profiling_info = 1
"""  # noqa: E501

ENUMS = """
AS_STATUS: ALLSPARK_SUCCESS=0 ALLSPARK_UNKNOWN_ERROR=1 ALLSPARK_PARAM_ERROR=2 ALLSPARK_IO_ERROR=3 ALLSPARK_MEMORY_ERROR=4 ALLSPARK_RUNTIME_ERROR=5 ALLSPARK_EXCEED_LIMIT_ERROR=7 ALLSPARK_INVALID_CALL_ERROR=8 ALLSPARK_EMPTY_REQUEST=9 ALLSPARK_ILLEGAL_REQUEST_ID=10 ALLSPARK_CACHE_MEMORY_OUT=11 ALLSPARK_REQUEST_DENIED=12 ALLSPARK_STREAMING=200
AsCacheMode: AsCacheDefault=0
AsMHAPrefill: AsPrefillDefault=0 AsPrefillFlashV2=10
DATA_MODE: DENSE=0 CSC=1 ELL=2
DATA_TYPE: DATATYPE_UNDEFINED=0 FLOAT32=1 FLOAT16=2 INT8=3 INT16=4 INT32=5 INT64=6 STRING=7 BOOL=8 BFLOAT16=9 UINT8=10
DEVICE_TYPE: DEVICETYPE_UNDEFINED=0 CPU=1 CUDA=2
GENERATE_STATUS: Init=0 ContextFinished=1 Generating=2 GenerateFinished=3 GenerateInterrupted=4
RequestInferType: Generate=0 ModelInference=1
RequestMMType: TextInput=0 MultiMediaTypeRichText=1
VocabType: VOCAB_TYPE_WPM=0 VOCAB_TYPE_SPM=1 VOCAB_TYPE_UGM=2 VOCAB_TYPE_BPE=3
"""  # noqa: E501

_SCALARS = {
    F.TYPE_STRING: "string", F.TYPE_BYTES: "bytes", F.TYPE_BOOL: "bool", F.TYPE_FLOAT: "float",
    F.TYPE_INT32: "int32", F.TYPE_INT64: "int64",
}  # fmt: skip
_PREFIX = "allspark.allspark_service."


def _type(field: F) -> str:
    if field.message_type is not None:
        return field.message_type.full_name.removeprefix(_PREFIX)
    if field.enum_type is not None:
        return field.enum_type.full_name.removeprefix(_PREFIX)
    return _SCALARS[field.type]


def _declaration(field: F) -> str:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return f"map<{_type(key)}, {_type(value)}> {field.name} = {field.number}"
    repeated = "repeated " if field.is_repeated else ""
    return f"{repeated}{_type(field)} {field.name} = {field.number}"


def _messages(container, prefix: str = "") -> dict[str, list[str]]:  # type: ignore[no-untyped-def]
    found = {}
    for m in container:
        if m.GetOptions().map_entry:
            continue
        found[prefix + m.name] = [_declaration(f) for f in m.fields]
        found |= _messages(m.nested_types, prefix + m.name + ".")
    return found


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_methods() -> None:
    service = S.services_by_name["AllSpark"]
    assert service.full_name == "allspark.allspark_service.AllSpark"
    got = [f"{m.name} {m.input_type.name} {m.output_type.name}" for m in service.methods]
    assert got == _lines(METHODS)
    assert not any(m.client_streaming or m.server_streaming for m in service.methods)


def test_messages() -> None:
    expected = {}
    for line in _lines(MESSAGES):
        name, _, fields = line.partition(":")
        expected[name] = [f.strip() for f in fields.split(";") if f.strip()]
    assert _messages(S.message_types_by_name.values()) == expected


def test_enums() -> None:
    got = {name: [f"{v.name}={v.number}" for v in enum.values] for name, enum in S.enum_types_by_name.items()}
    expected = {line.partition(":")[0]: line.partition(":")[2].split() for line in _lines(ENUMS)}
    assert got == expected
