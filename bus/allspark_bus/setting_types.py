"""Field types that every settings class shares: lists, addresses, sizes, directories.

All of them validate at the edge; the ``ValueError`` says what a legal value looks like.
"""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from allspark_bus import redis_url

# Weights rounded at load: 8 bits per output channel; 4 bits in groups of 128, 64 or 32. Values of
# matmul_precision and of --dtype.
WEIGHT_FORMATS = ("int8", "int4", "int4_g64", "int4_g32")
Dtype = Literal["auto", "bf16", "fp16", "fp32", "int8", "int4", "int4_g64", "int4_g32"]


class Metavar:
    """Names a flag's value in the help: ``Annotated[StrList, Metavar("PATH[=NAME]")]``."""

    def __init__(self, text: str) -> None:
        self.text = text


def split_list(value: object) -> object:
    """Split the text of an environment variable at its commas; a list, as flags and files give it, stays."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def split_host_port(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (``[::1]:PORT`` for IPv6); raise ``ValueError`` for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT with a port from 0 to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{address!r}: write an IPv6 address in brackets, as in [::1]:50051")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and the loopback ranges of IPv4 and IPv6; a name is never looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_address(address: str) -> bool:
    """True if only this machine can reach a gRPC address or ZeroMQ endpoint."""
    if address.startswith(("unix:", "ipc://")):
        return True
    return is_loopback(split_host_port(address.removeprefix("tcp://"))[0])


def grpc_address(value: str) -> str:
    """Accept ``HOST:PORT`` or ``unix:/absolute/path``."""
    if value.startswith("unix:"):
        if not value.removeprefix("unix:").startswith("/"):
            raise ValueError(f"{value!r}: a unix socket is unix:/absolute/path")
        return value
    split_host_port(value)
    return value


def zmq_endpoint(value: str) -> str:
    """Accept ``tcp://HOST:PORT`` or ``ipc:///absolute/path``."""
    if value.startswith("ipc://"):
        if not value.removeprefix("ipc://").startswith("/"):
            raise ValueError(f"{value!r}: an ipc endpoint is ipc:///absolute/path")
        return value
    if not value.startswith("tcp://"):
        raise ValueError(f"{value!r} is neither tcp://HOST:PORT nor ipc:///absolute/path")
    split_host_port(value.removeprefix("tcp://"))
    return value


def checked_redis_url(value: str) -> str:
    """Accept the URLs of one server, of Sentinels and of a cluster that ``redis_url`` describes."""
    redis_url.check(value)
    return value


def device_name(value: str) -> str:
    """Accept ``cpu``, ``cuda`` and ``cuda:INDEX,...``; ``cuda`` means ``cuda:0``."""
    if value == "cuda":
        return "cuda:0"
    ids = value.removeprefix("cuda:").split(",")
    if value == "cpu" or (value.startswith("cuda:") and all(i.isdigit() for i in ids)):
        if len(set(ids)) < len(ids):
            raise ValueError(f"{value!r} names a device twice")
        return value
    raise ValueError(f"{value!r} is neither cpu nor cuda:INDEX,...")


#: Lists: repeat the flag; in an environment variable, separate the values by commas.
StrList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
PathList = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(split_list), Metavar("DIR")]
GrpcAddress = Annotated[str, AfterValidator(grpc_address), Metavar("ADDR")]
GrpcAddresses = Annotated[tuple[GrpcAddress, ...], NoDecode, BeforeValidator(split_list), Metavar("ADDR")]
ZmqEndpoint = Annotated[str, AfterValidator(zmq_endpoint), Metavar("ENDPOINT")]
ZmqEndpoints = Annotated[tuple[ZmqEndpoint, ...], NoDecode, BeforeValidator(split_list), Metavar("ENDPOINT")]
RedisUrl = Annotated[str, AfterValidator(checked_redis_url), Metavar("URL")]
Device = Annotated[str, AfterValidator(device_name), Metavar("cpu|cuda:INDEX,...")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Metavar("SECONDS")]
Count = Annotated[int, Field(ge=1), Metavar("N")]
#: Bytes; accepts "64MiB", "2GB" and plain numbers.
Size = Annotated[ByteSize, Field(gt=0), Metavar("BYTES")]
