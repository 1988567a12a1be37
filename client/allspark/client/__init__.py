"""Client library of the AllSpark service: ``Client`` for threads, ``AsyncClient`` for asyncio.

::

    with Client(["10.0.0.5:50051", "10.0.0.6:50051"]) as client:
        options = GenerateOptions(max_new_tokens=64, eos_token_id=2)
        with client.submit("smollm2", prompt_ids, options) as request:
            for new_ids in request.stream():
                ...
            print(request.finish_reason)

Any address serves any request: when one stops answering, the next one is asked for the same uuid, and the
client's own cursor makes every token arrive exactly once. Imports the contracts and grpcio only.
"""

from allspark.client.access import Access
from allspark.client.aio import AsyncClient, AsyncRequest
from allspark.client.errors import (
    AccessDenied,
    AllSparkError,
    FleetUnavailable,
    RequestInterrupted,
    StatusError,
)
from allspark.client.options import CACHE_MODES, GenerateOptions, ModelOptions
from allspark.client.sync import Client, Request

__all__ = [
    "CACHE_MODES",
    "Access",
    "AccessDenied",
    "AllSparkError",
    "AsyncClient",
    "AsyncRequest",
    "Client",
    "FleetUnavailable",
    "GenerateOptions",
    "ModelOptions",
    "Request",
    "RequestInterrupted",
    "StatusError",
]
