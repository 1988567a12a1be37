"""The loop of upstream's examples with code generated from the .proto alone (see test_generated_client.py).

python canonical_client.py STUBS ADDRESS MODEL_PATH NEW_TOKENS ID...
"""

import json
import struct
import sys

import grpc

stubs, address, path, new, *ids = sys.argv[1:]
sys.path.insert(0, stubs)
import allspark_service_pb2 as pb  # type: ignore[import-not-found]  # noqa: E402
import allspark_service_pb2_grpc as rpc  # type: ignore[import-not-found]  # noqa: E402

assert not [m for m in sys.modules if m.startswith("allspark_proto")], "no code of the fleet is used"
server = rpc.AllSparkStub(grpc.insecure_channel(address))
assert server.GetRankId(pb.Empty()).rank_id == 0
ranks = server.GetRankNums(pb.Empty()).rank_id
name = f"canonical-{address.partition(':')[0]}"
config = pb.ModelStructConfig(
    model_name=name, model_path=path, weights_path=path, compute_unit="CPU:0", matmul_precision="highest",
    swap_threshold=-1, engine_max_length=256, engine_max_batch=4, cache_span_size=32,
    enable_prefix_cache=True, prefix_cache_ttl=300, prefill_mode=pb.AsPrefillFlashV2,
)  # fmt: skip
assert server.BuildModelFromConfigStruct(config).as_status == pb.ALLSPARK_SUCCESS
assert server.StartModel(pb.ModelName(model_name=name)).as_status == pb.ALLSPARK_SUCCESS
assert server.GetRankNums(pb.Empty()).rank_id == 1

request = pb.StartRequestRequest(model_name=name)
for key, values in (("input_ids", [int(i) for i in ids]), ("attention_mask", [1] * len(ids))):
    tensor = request.inputs.tensor_map[key]
    tensor.name = "tensor"
    tensor.shape.dims.extend([1, len(ids)])
    tensor.device_type.dev_type = pb.CPU
    tensor.data_type = pb.INT64
    tensor.data = struct.pack(f"<{len(ids)}q", *values)
request.config.uuid = "00000000000000000000000000000000"
request.config.do_sample = True
request.config.top_k = 1
request.config.top_p = 1.0
request.config.temperature = 1.0
request.config.repetition_penalty = 1.0
request.config.num_beams = request.config.num_return_sequences = 1
request.config.eos_token_id = 102
request.config.max_length = len(ids) + int(new)
started = server.StartRequest(request)
assert started.as_status == pb.ALLSPARK_SUCCESS
uuid = pb.UUID(uuid=started.uuid)
tokens: list[int] = []
while True:
    elements = server.Get(uuid)
    tokens.extend(elements.ids_from_generate)
    status = server.GenerateStatus(uuid).status
    if status in (pb.GenerateFinished, pb.GenerateInterrupted):
        break
assert server.GeneratedLength(uuid).len == len(tokens)
assert server.GetAsEngineStat(pb.ModelName(model_name=name)).total_generated_token >= len(tokens)
released = server.ReleaseRequest(pb.StopRequestRequest(model_name=name, uuid=started.uuid))
assert (released.as_status, released.uuid) == (pb.ALLSPARK_SUCCESS, started.uuid)
assert server.StopModel(pb.ModelName(model_name=name)).as_status == pb.ALLSPARK_SUCCESS
assert server.ReleaseModel(pb.ModelName(model_name=name)).as_status == pb.ALLSPARK_SUCCESS
version = server.GetVersionFull(pb.Empty()).version_info
print(json.dumps({"tokens": tokens, "status": status, "ranks_before": ranks, "version": version}))
