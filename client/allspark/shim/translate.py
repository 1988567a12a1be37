"""Between the two generations of the interface (spec 0.2): pure functions."""

from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import dashinfer_v1_pb2 as v1

#: What the client sends when its user chose no uuid: not an id at all.
DEFAULT_UUIDS = frozenset({"", "Default-UUID", "Default-User-UUID"})


def model_config(old: v1.ModelStructConfig, model: str, path: str) -> pb.ModelStructConfig:
    """How the fleet builds a model for a client of the first generation.

    The graph and weight files are DashInfer's own formats, hence `path`; device, threads and prefill mode
    are about the client's machine, hence left to the workers. What that generation does not know gets the
    defaults of the second one's native client.
    """
    return pb.ModelStructConfig(
        model_name=model,
        model_path=path,
        matmul_precision=old.matmul_precision,
        engine_max_length=old.engine_max_length,
        engine_max_batch=old.engine_max_batch,
        cache_mode=pb.AsCacheMode.ValueType(old.cache_mode),
        swap_threshold=-1,
        enable_prefix_cache=True,
        prefix_cache_ttl=300,
    )


def elements(ids: list[int]) -> pb.GeneratedElements:
    """The answer of Get and GetNoWait; no tokens are null (`empty` 1) in that generation."""
    answer = pb.GeneratedElements(empty=0 if ids else 1, ids_from_generate=ids)
    answer.tensors_from_model_inference.SetInParent()
    return answer


def prompt_length(request: pb.StartRequestRequest) -> int:
    """Tokens of the prompt, as its shape says; 0 if there is none."""
    dims = (
        request.inputs.tensor_map["input_ids"].shape.dims if "input_ids" in request.inputs.tensor_map else ()
    )
    return int(dims[-1]) if dims else 0
