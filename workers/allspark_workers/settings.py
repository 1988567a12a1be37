"""Settings of a worker."""

from typing import Annotated, ClassVar, Literal, Self

from allspark_bus.setting_types import Count, Device, Dtype, Metavar, PathList, Seconds, Size, ZmqEndpoints
from allspark_bus.settings import ProcessSettings
from pydantic import ByteSize, Field, model_validator


class WorkerSettings(ProcessSettings):
    """Own one device: load models, generate tokens, append them to Redis."""

    command: ClassVar[str] = "worker"

    broker: ZmqEndpoints = ("tcp://127.0.0.1:5551",)
    """Backend endpoint of a broker. Repeat for several; the worker serves all of them."""
    device: Device = "cpu"
    """Where models run: cpu, cuda:INDEX, or several GPUs for models whose compute_unit names several."""
    name: str = ""
    """Name shown in status and logs; empty: made from host and process id."""
    model_root: PathList = ()
    """Directory that models may be loaded from. Repeat for several; without one no model can be loaded."""
    num_threads: Annotated[int, Field(ge=0), Metavar("N")] = 0
    """CPU threads for one step; 0: chosen from the cores this process may use."""
    kv_memory: Annotated[Size | None, Metavar("BYTES")] = None
    """Memory for KV spans, for example 2GiB; unset: chosen from what the device has free."""
    prefix_host_memory: Annotated[Size | None, Metavar("BYTES")] = None
    """Host memory per model for cached prefixes that leave the KV spans, for example 8GiB; unset: none."""
    dtype: Dtype = "auto"
    """Number format of products; auto: weights as saved, activations as precise as the device has them; int8,
    int4 (groups of 128), int4_g64, int4_g32: weights are rounded to so many bits at load and stay so."""
    kernels: Literal["auto", "torch", "native", "triton"] = "auto"
    """Implementation of the kernels; auto: Triton on CUDA, native on CPU, PyTorch where that is missing."""
    lora_max_num: Annotated[int, Field(ge=0), Metavar("N")] = 5
    """LoRA adapters in memory at a time, per model; 0: requests may name none."""
    lora_max_rank: Count = 64
    """Largest rank of a LoRA adapter."""
    max_queue: Count = 1024
    """Requests that may wait inside this worker."""
    heartbeat_s: Seconds = 0.4
    """Time between heartbeats to a broker."""
    broker_timeout_s: Seconds = 5.0
    """A broker that has been silent for this long is reconnected."""
    stall_s: Seconds = 30.0
    """With requests running and no step for this long, the worker gives up and exits."""
    publish_buffer: Count = 65536
    """Tokens held back while Redis does not answer; requests pause when it is full."""
    publish_interval_s: Annotated[float, Field(ge=0, allow_inf_nan=False), Metavar("SECONDS")] = 0.06
    """Least time between two appends, in which tokens gather; first tokens and endings never wait."""
    max_grammar_bytes: Size = ByteSize(256 << 10)
    """Longest JSON schema, regular expression or grammar that a request may ask its text to follow."""
    grammar_cpu_s: Seconds = 2.0
    """CPU time that compiling one of them may take."""
    profile: bool = False
    """Measure every operator for GetOpProfilingInfo."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.broker:
            raise ValueError("a worker needs at least one --broker endpoint")
        if self.broker_timeout_s < 3 * self.heartbeat_s:
            raise ValueError("--broker-timeout-s must be at least three times --heartbeat-s")
        for root in self.model_root:
            if not root.is_absolute():
                raise ValueError(f"--model-root {root} must be an absolute path")
        return self
