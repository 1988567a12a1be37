"""How much work a request may be, in tokens: what tenants are charged for and limited by. Pure."""

from allspark_bus import tensors
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb


def work_of(request: pb.StartRequestRequest, max_length: int) -> int:
    """Prompt tokens and the most that may be generated, over all sequences; at least 1.

    `max_length`: prompt and output of one sequence where the request does not say it.
    """
    try:
        num_prompt = len(tensors.prompt_ids(request))
    except FleetError:
        return 1  # a request without token ids ends at once
    config = request.config
    if request.infer_type == pb.ModelInference or config.probe_only:
        return max(1, num_prompt)
    num_new = max(0, (config.max_length or max_length) - num_prompt)
    return max(1, num_prompt + num_new * max(1, config.num_beams, config.num_return_sequences))
