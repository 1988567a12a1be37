"""How much work a request may be, in tokens: what tenants are charged for and limited by. Pure."""

from dataclasses import dataclass

from allspark_bus import tensors
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb


@dataclass(frozen=True, slots=True)
class Work:
    """Prompt tokens, the most that may be generated over all sequences, and how many of these there are."""

    prompt: int
    output: int = 0
    rows: int = 1

    @property
    def returnable(self) -> int:
        """Of `tokens`, those that need not be paid if they are not generated.

        With several sequences nobody knows how many each of them has generated.
        """
        return self.output if self.rows == 1 else 0

    @property
    def tokens(self) -> int:
        """Both; at least 1."""
        return max(1, self.prompt + self.output)


def work_of(request: pb.StartRequestRequest, max_length: int) -> Work:
    """`max_length`: prompt and output of one sequence where the request does not say it."""
    try:
        num_prompt = len(tensors.prompt_ids(request))
    except FleetError:
        return Work(1)  # a request without token ids ends at once
    config = request.config
    if request.infer_type == pb.ModelInference or config.probe_only:
        return Work(num_prompt)
    num_new = max(0, (config.max_length or max_length) - num_prompt)
    rows = max(1, config.num_beams, config.num_return_sequences)
    return Work(num_prompt, num_new * rows, rows)
