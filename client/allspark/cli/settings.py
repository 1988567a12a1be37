"""Settings of the commands that are not processes of a fleet."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from allspark_bus.setting_types import (
    Count,
    Dtype,
    GrpcAddresses,
    Metavar,
    PathList,
    RedisUrl,
    Seconds,
    Size,
    StrList,
    ZmqEndpoints,
    split_list,
)
from allspark_bus.settings import Alias, Positional, Settings
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode


def _not_reserved(name: str) -> str:
    if name in ("admin", "operator"):
        raise ValueError(f"{name!r} is the operator's: choose another name")
    return name


CacheModeName = Literal["default", "int8", "uint4"]
LogLevel = Literal["debug", "info", "warning", "error"]
#: Of a tenant that a token is made for: also the token's name, so no dot, and neither the operator's.
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$"), AfterValidator(_not_reserved)]
Natural = Annotated[int, Field(ge=0), Metavar("N")]


class AccessSettings(Settings):
    """What the commands that call a gateway have in common."""

    tls_ca: Annotated[Path | None, Metavar("FILE")] = None
    """Certificates (PEM) of the authorities that gateways are trusted by; turns TLS on for HOST:PORT."""
    tls_cert: Annotated[Path | None, Metavar("FILE")] = None
    """Own certificate (PEM), for gateways that ask for one."""
    tls_key: Annotated[Path | None, Metavar("FILE")] = None
    """Private key of --tls-cert (PEM)."""
    token_file: Annotated[Path | None, Metavar("FILE")] = None
    """File that holds the token to call with."""


class FleetSettings(Settings):
    """What ``up``, ``demo`` and ``bench`` have in common: how the workers run."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), Metavar("cpu|cuda[:I]")] = "cpu"
    """Where models run. cuda spreads the workers over the GPUs, cuda:1 puts all of them on that one."""
    num_threads: Natural = 0
    """CPU threads of each worker; 0: the cores are shared out."""
    kv_memory: Annotated[Size | None, Metavar("BYTES")] = None
    """Memory for KV spans of each worker, for example 2GiB; unset: chosen from what is free."""
    dtype: Dtype = "auto"
    """Number format of products; auto: weights as saved, activations as precise as the device has them; int8,
    int4 (groups of 128), int4_g64, int4_g32: weights are rounded to so many bits at load and stay so."""
    kernels: Literal["auto", "torch", "native", "triton"] = "auto"
    """Implementation of the kernels; auto: Triton on CUDA, native on CPU, PyTorch where that is missing."""
    log_level: LogLevel = "warning"
    """Lowest severity of the processes' log lines that are shown."""


class UpSettings(FleetSettings):
    """Run a whole fleet on this machine: store, brokers, gateways, workers. Ctrl-C drains and stops it."""

    command: ClassVar[str] = "up"

    model: Annotated[StrList, Metavar("PATH[=NAME]")] = ()
    """Model to build and start: a Hugging Face directory or a GGUF file; smollm2 means the demo model.
    Repeat for several."""
    workers: Count = 1
    """Number of workers."""
    gateways: Count = 1
    """Number of gateways."""
    brokers: Count = 1
    """Number of brokers."""
    grpc: GrpcAddresses = ("127.0.0.1:50051",)
    """Address to serve: HOST:PORT (port 0: any free one) or unix:/path. One gateway serves all that are
    given; several gateways take one each, or count up from a single one."""
    data_dir: Path | None = None
    """Directory of the embedded store; what it holds survives a restart. Default: allspark/ in the user's
    state directory."""
    redis: Annotated[RedisUrl | None, Field(repr=False), Metavar("URL")] = None
    """Use this Redis or Valkey instead of the embedded one."""
    redis_fsync: Literal["always", "everysec", "no"] = "everysec"
    """When the embedded store has its writes on the disk: before it answers (always), within two seconds, or
    when the system likes (no). A crash of the machine loses what was not there yet."""
    model_root: PathList = ()
    """Directory from which clients may build further models. Repeat for several."""
    max_length: Natural = 0
    """Longest request of the models started here, in tokens, prompt included; 0: the model's own limit."""
    max_batch: Natural = 0
    """Requests that a worker decodes together; 0: 32."""
    cache_mode: CacheModeName = "default"
    """How K and V of the models are kept: default in the model's number format; int8 and uint4 hold about two
    and four times as many tokens, less exactly."""
    profile: bool = False
    """Measure every operator for GetOpProfilingInfo."""
    secure: Annotated[Path | None, Metavar("DIR")] = None
    """Directory of allspark certs, made if it does not exist: TLS and tokens on HOST:PORT, CURVE between the
    processes, an ACL user on the embedded store. It may not be combined with --redis."""
    allow_remote: bool = False
    """Allow --grpc addresses that other machines can reach."""
    allow_shutdown: GrpcAddresses = ()
    """Address of --grpc whose callers may stop the whole fleet with ShutdownService."""
    drain_s: Seconds = 30.0
    """How long running work may take to finish when the fleet stops."""
    start_timeout_s: Seconds = 60.0
    """How long one process may take to start."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.redis is not None and self.redis_fsync != "everysec":
            raise ValueError("--redis-fsync is for the embedded store: set appendfsync of your own one")
        if self.secure is not None and self.redis is not None:
            raise ValueError(
                "--secure is for the embedded store; docs/security.md tells how to secure another"
            )
        if self.secure is not None and all(address.startswith("unix:") for address in self.grpc):
            raise ValueError("--secure is for HOST:PORT addresses, and --grpc has none")
        return self


class LoadSettings(AccessSettings):
    """Build and start models on a fleet that runs already."""

    command: ClassVar[str] = "load"

    model: Annotated[StrList, Metavar("PATH[=NAME]"), Field(min_length=1)] = ()
    """Model as the workers see it: a path inside their model root, and its name. Repeat for several."""
    grpc: GrpcAddresses = ("127.0.0.1:50051",)
    """Address of a gateway. Repeat for several; the next one is used when one does not answer."""
    compute_unit: Annotated[str, Metavar("CPU:0|CUDA:0,1")] = ""
    """Kind of device that the model needs; empty: any."""
    max_length: Natural = 0
    """Longest request in tokens, prompt included; 0: the model's own limit."""
    max_batch: Natural = 0
    """Requests that a worker decodes together; 0: 32."""
    cache_mode: CacheModeName = "default"
    """How K and V of the models are kept: default in the model's number format; int8 and uint4 hold about two
    and four times as many tokens, less exactly."""
    lora_names: Annotated[StrList, Metavar("NAME")] = ()
    """LoRA adapter to load with each of the models. Repeat for several; others are loaded at first use."""
    timeout_s: Seconds = 600.0
    """How long one model may take to load."""


class DashinferShimSettings(AccessSettings):
    """Write a directory for the AS_DAEMON_PATH of DashInfer 1.x programs, which then run on a fleet."""

    command: ClassVar[str] = "dashinfer-shim"

    directory: Annotated[Path, Positional()]
    """Directory to write; it is made if it does not exist."""
    grpc: GrpcAddresses = ("127.0.0.1:50051",)
    """Address of a gateway. Repeat for several; the next one is used when one does not answer."""
    model: Annotated[StrList, Metavar("NAME=MODEL[@PATH]")] = ()
    """What the program's name of a model means: a model of the fleet. * as NAME is every other name. With
    PATH, as the workers see it, the model is built from there if the fleet does not have it. Repeat for
    several. Default: the fleet's model of the same name."""


class CertsSettings(Settings):
    """Write a development set of what secures a fleet: authority, certificates, tokens (docs/security.md)."""

    command: ClassVar[str] = "certs"

    directory: Annotated[Path, Positional()]
    """Directory to write; nothing may be in it yet."""
    host: Annotated[StrList, Metavar("HOST")] = ()
    """Name or IP address of a server besides localhost. Repeat for several."""
    tenant: Annotated[tuple[TenantName, ...], NoDecode, BeforeValidator(split_list), Metavar("NAME")] = (
        "default",
    )
    """Tenant that gets a token with the scope infer. Repeat for several."""
    days: Count = 365
    """How long the certificates are valid."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.tenant)) < len(self.tenant):
            raise ValueError("--tenant names one twice")
        return self


class SamplingSettings(Settings):
    """The sampling fields of a request, as flags."""

    max_new_tokens: Count = 256
    """Most tokens to generate."""
    min_length: Natural = 0
    """Shortest result in tokens, prompt included; the end-of-text token is held back until then."""
    do_sample: bool = False
    """Draw tokens at random; otherwise the likeliest one is taken."""
    temperature: Annotated[float, Field(ge=0), Metavar("X")] = 1.0
    """Flatness of the distribution; 0 is greedy."""
    top_k: Natural = 0
    """Draw among the K likeliest tokens; 0: all."""
    top_p: Annotated[float, Field(ge=0, le=1), Metavar("P")] = 0.0
    """Draw among the likeliest tokens that together exceed this probability; 0: off."""
    seed: Annotated[int, Metavar("N")] = 0
    """The same seed and request give the same tokens, on any worker."""
    repetition_penalty: Annotated[float, Field(ge=0, le=2), Metavar("X")] = 1.0
    """Above 1, tokens that occurred become less likely."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2), Metavar("X")] = 0.0
    """Subtracted once from the logits of every token generated before."""
    suppress_repetition_in_generation: bool = False
    """Apply the repetition penalty to generated tokens only."""
    no_repeat_ngram_size: Natural = 0
    """No sequence of this many tokens occurs twice; 0: off."""
    stop: Annotated[StrList, Metavar("TEXT")] = ()
    """End when the result ends with the tokens of this text. Repeat for several."""
    bad_word: Annotated[StrList, Metavar("TEXT")] = ()
    """Never generate the tokens of this text in sequence. Repeat for several."""
    lora_name: Annotated[str, Metavar("NAME")] = ""
    """LoRA adapter to use: a directory below the model's weights or below a model root of the workers."""
    json_schema: Annotated[Path | None, Metavar("FILE")] = None
    """Generate JSON that the schema in this file allows."""
    regex: Annotated[str, Metavar("PATTERN")] = ""
    """Generate text that this regular expression matches as a whole."""
    grammar: Annotated[Path | None, Metavar("FILE")] = None
    """Generate a text of the grammar in this file (Lark or GBNF)."""

    @model_validator(mode="after")
    def _one_document(self) -> Self:
        if sum(map(bool, (self.json_schema, self.regex, self.grammar))) > 1:
            raise ValueError("give one of --json-schema, --regex and --grammar")
        return self


class GenerateSettings(SamplingSettings, AccessSettings):
    """Send a prompt to a fleet and stream the text that it generates."""

    command: ClassVar[str] = "generate"

    prompt: Annotated[str, Positional()]
    """The text to go on from, or the question with --chat; - reads it from standard input."""
    grpc: GrpcAddresses = ("127.0.0.1:50051",)
    """Address of a gateway. Repeat for several; the next one is used when one does not answer."""
    model: Annotated[str, Metavar("NAME")] = "smollm2"
    """Name under which the model was built."""
    tokenizer: Annotated[Path | None, Metavar("PATH")] = None
    """The model's directory, tokenizer.json or GGUF file; not needed for smollm2."""
    chat: bool = False
    """Apply the model's chat template to the prompt."""
    system: Annotated[str, Metavar("TEXT")] = ""
    """System message for --chat."""
    stats: bool = True
    """Report speed and time to first token on standard error."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.system and not self.chat:
            raise ValueError("--system needs --chat")
        return self


class StatusSettings(AccessSettings):
    """Show the models, workers and requests of a fleet."""

    command: ClassVar[str] = "status"

    grpc: GrpcAddresses = ()
    """Address of a gateway. Repeat for several. Default, without --broker: 127.0.0.1:50051."""
    broker: ZmqEndpoints = ()
    """Frontend endpoint of a broker, for the list of models and workers. Repeat for several."""
    curve: Annotated[Path | None, Metavar("DIR")] = None
    """Directory of CURVE keys for --broker (docs/security.md)."""
    model: Annotated[StrList, Metavar("NAME")] = ()
    """Model to show figures of; the ones that a broker lists are shown anyway. Repeat for several."""
    expect_worker: Annotated[str, Metavar("PREFIX")] = ""
    """Fail unless a broker lists a worker whose name begins like this (for health checks)."""
    timeout_s: Seconds = 5.0
    """How long to wait for an answer."""
    as_json: Annotated[bool, Alias("--json")] = False
    """Print one JSON object instead of tables."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.expect_worker and not self.broker:
            raise ValueError("--expect-worker needs --broker")
        return self

    def gateways(self) -> tuple[str, ...]:
        """The gateways to ask."""
        return self.grpc or (() if self.broker else ("127.0.0.1:50051",))


class DemoSettings(FleetSettings):
    """Fetch the demo model, run a fleet, ask one question through gRPC, stream the answer, shut down."""

    command: ClassVar[str] = "demo"

    question: Annotated[str, Positional()] = "What is the capital of France?"
    """What to ask."""
    max_new_tokens: Count = 128
    """Most tokens to generate."""


class BenchSettings(FleetSettings):
    """Measure. throughput: tokens per second and time to first token, engine and fleet in turns. prefix: time
    to first token of a fleet against the part of the prompt that its prefix cache has. overload: what becomes
    of more requests than a fleet can serve."""

    command: ClassVar[str] = "bench"

    benchmark: Annotated[Literal["throughput", "prefix", "overload"], Positional()] = "throughput"
    """What to measure: throughput, prefix or overload."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Number format of products, in the engine and in the fleet."""
    model: Annotated[str, Metavar("PATH")] = "smollm2"
    """A Hugging Face directory or a GGUF file; smollm2 means the demo model."""
    batch: Annotated[StrList, Metavar("N")] = ("1", "16")
    """Requests at once. Repeat for several."""
    prompt_tokens: Count = 128
    """Length of each random prompt (throughput, overload)."""
    prefix_tokens: Annotated[int, Field(ge=33), Metavar("N")] = 1024
    """Length of each random prompt (prefix)."""
    hit_rate: Annotated[StrList, Metavar("PERCENT")] = ("0", "30", "60", "90")
    """Part of the prompt that the cache has (prefix). Repeat for several."""
    plot: Annotated[Path | None, Metavar("FILE.svg")] = None
    """Draw the result into this file (prefix)."""
    new_tokens: Annotated[int, Field(ge=2), Metavar("N")] = 128
    """Tokens to generate for each prompt; the end-of-text token is ignored."""
    times: Annotated[float, Field(gt=0, allow_inf_nan=False), Metavar("X")] = 10.0
    """Load as a multiple of the rate that the fleet can serve, which is measured first (overload)."""
    seconds: Seconds = 10.0
    """How long the load lasts (overload)."""
    deadline_s: Seconds = 10.0
    """Deadline of each request (overload)."""
    cache_mode: CacheModeName = "default"
    """How K and V of the model are kept: default in the model's number format; int8 and uint4 hold about two
    and four times as many tokens, less exactly."""
    repeat: Count = 5
    """Measurements of each kind; engine and fleet take turns, and the median is reported."""
    seed: Annotated[int, Metavar("N")] = 0
    """Seed of the random prompts."""
    as_json: Annotated[bool, Alias("--json")] = False
    """Print one JSON object per result instead of a table."""


def all_settings() -> list[type[Settings]]:
    """Every settings class of the distribution; together they know every environment variable."""
    from allspark_broker.settings import BrokerSettings
    from allspark_gateway.settings import GatewaySettings
    from allspark_workers.settings import WorkerSettings

    processes: list[type[Settings]] = [GatewaySettings, BrokerSettings, WorkerSettings]
    return [
        *processes,
        UpSettings,
        LoadSettings,
        CertsSettings,
        DashinferShimSettings,
        GenerateSettings,
        StatusSettings,
        DemoSettings,
        BenchSettings,
    ]
