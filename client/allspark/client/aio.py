"""The asyncio client."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import grpc
import grpc.aio
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

from allspark.client.access import Access
from allspark.client.calls import (
    GET_WAIT_S,
    OPERATOR,
    Attempts,
    Place,
    Progress,
    Route,
    channel_options,
    check_status,
    trailing_texts,
)
from allspark.client.errors import AllSparkError, StatusError
from allspark.client.options import GenerateOptions, ModelOptions, Prompt, start_request_message


class AsyncClient:
    """Calls a fleet through any of its gateways; the arguments are those of ``Client``."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        timeout_s: float = 15.0,
        model_timeout_s: float = 600.0,
        retry_s: float = 30.0,
        access: Access | None = None,
    ) -> None:
        self._access = access or Access()
        self._route = Route(addresses, retry_s)
        self._access.check(self._route.addresses)
        self._timeout_s = timeout_s
        self._model_timeout_s = model_timeout_s
        self._channels: dict[Place, grpc.aio.Channel] = {}

    async def submit(
        self,
        model: str,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        uuid: str | None = None,
    ) -> "AsyncRequest":
        """Start generating; see ``Client.submit``."""
        message = start_request_message(model, prompt, options or GenerateOptions(), uuid or uuid4().hex)
        reply, trailing = await self.call("StartRequest", message)
        check_status("StartRequest", reply.as_status, trailing)
        return AsyncRequest(self, model, reply.uuid)

    def attach(self, model: str, uuid: str, received: int = 0) -> "AsyncRequest":
        """A request submitted earlier, or elsewhere; reading goes on after ``received`` tokens."""
        return AsyncRequest(self, model, uuid, received)

    async def build_model(
        self, name: str, path: str, options: ModelOptions | None = None, *, is_operator: bool = False
    ) -> None:
        """Load a model on the fleet's workers; returns when it is loaded.

        With ``is_operator`` it belongs to the fleet's operator: ShutdownService of no client releases it.
        """
        config = (options or ModelOptions()).to_config(name, path)
        await self._status("BuildModelFromConfigStruct", config, OPERATOR if is_operator else ())

    async def start_model(self, name: str) -> None:
        """Start serving a built model."""
        await self._status("StartModel", pb.ModelName(model_name=name))

    async def stop_model(self, name: str) -> None:
        """Drain a model and stop serving it."""
        await self._status("StopModel", pb.ModelName(model_name=name))

    async def release_model(self, name: str) -> None:
        """Free everything that belongs to a model."""
        await self._status("ReleaseModel", pb.ModelName(model_name=name))

    async def stat(self, model: str) -> pb.AsEngineStat:
        """Memory, queue and speed figures of a model, summed over its workers."""
        reply: pb.AsEngineStat = (await self.call("GetAsEngineStat", pb.ModelName(model_name=model)))[0]
        return reply

    async def version(self) -> str:
        """The fleet's version text; also a cheap test that a gateway answers."""
        return str((await self.call("GetVersionFull", pb.Empty()))[0].version_info)

    async def sync(self, uuid: str = "") -> None:
        """Wait until a request (or, with an empty uuid, every request of this tenant) has ended."""
        message = pb.StopRequestRequest(uuid=uuid)
        reply, trailing = await self.call("SyncRequest", message, timeout_s=self._model_timeout_s)
        check_status("SyncRequest", reply.as_status, trailing)

    async def close(self) -> None:
        """Close the connections; requests live on."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def call(
        self,
        name: str,
        message: object,
        *,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> tuple[Any, dict[str, str]]:
        """Any RPC by its name: answer and trailing metadata; a failure goes on to the other addresses."""
        attempts = Attempts(name, self._route)
        while True:
            place = attempts.place()
            try:
                return await self._once(place, name, message, timeout_s or self._timeout_s, metadata)
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(attempts.failed(place[0], error.code(), error.details() or ""))

    async def wait_for_tokens(self, message: pb.UUID, progress: Progress, wait_s: float) -> list[int]:
        """One Get that waits at most ``wait_s``; an empty list means that nothing came in this time."""
        attempts = Attempts("Get", self._route)
        while True:
            place = attempts.place()
            try:
                reply, trailing = await self._once(place, "Get", message, wait_s, progress.metadata())
                break
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._route.leave(place[0])
                    return []
                await asyncio.sleep(attempts.failed(place[0], error.code(), error.details() or ""))
        ids = progress.accept(reply, trailing)
        if not ids and not progress.is_ended:
            status, trailing = await self.call("GenerateStatus", message)
            progress.accept_status(status.status, trailing)
        return ids

    async def _once(
        self, place: Place, name: str, message: object, timeout_s: float, metadata: Sequence[tuple[str, str]]
    ) -> tuple[Any, dict[str, str]]:
        call = getattr(self._stub(place), name)(
            message, timeout=timeout_s, metadata=self._access.metadata(metadata)
        )
        reply = await call
        return reply, trailing_texts(await call.trailing_metadata())

    async def _status(self, name: str, message: object, metadata: Sequence[tuple[str, str]] = ()) -> None:
        reply, trailing = await self.call(name, message, timeout_s=self._model_timeout_s, metadata=metadata)
        check_status(name, reply.as_status, trailing)

    def _stub(self, place: Place) -> object:
        if place not in self._channels:
            address, patience = place
            self._channels[place] = self._access.aio_channel(address, channel_options(patience))
        return AllSparkStub(self._channels[place])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncRequest:
    """A request that the fleet accepted. As an async context manager it is released at the end."""

    def __init__(self, client: AsyncClient, model: str, uuid: str, received: int = 0) -> None:
        self._client = client
        self.model = model
        self.uuid = uuid
        self.progress = Progress(uuid, received)

    @property
    def finish_reason(self) -> str:
        """Why generation ended; empty while it runs."""
        return self.progress.finish_reason

    async def stream(self, timeout_s: float | None = None) -> AsyncIterator[list[int]]:
        """New token ids as they are generated, until the end; see ``Request.stream``."""
        message = pb.UUID(uuid=self.uuid)
        while not self.progress.is_ended:
            ids = await self._next_tokens(message, timeout_s)
            if ids:
                yield ids
        self.progress.raise_if_interrupted()

    async def _next_tokens(self, message: pb.UUID, timeout_s: float | None) -> list[int]:
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait_s = GET_WAIT_S if give_up is None else min(GET_WAIT_S, give_up - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError(f"request {self.uuid}: no token for {timeout_s:g} s")
            ids = await self._client.wait_for_tokens(message, self.progress, wait_s)
            if ids or self.progress.is_ended:
                return ids

    async def stream_text(self, timeout_s: float | None = None) -> AsyncIterator[str]:
        """The text of a request whose prompt was text, as it is generated; raises as ``stream``.

        Pieces hold whole characters, and together they are the text of all tokens.
        """
        message = pb.UUID(uuid=self.uuid)
        while not self.progress.is_ended:
            await self._next_tokens(message, timeout_s)
            if text := self.progress.take_text():
                yield text
        self.progress.raise_if_interrupted()

    async def result(self, timeout_s: float | None = None) -> list[int]:
        """All token ids that are still to come."""
        return [token async for ids in self.stream(timeout_s) for token in ids]

    async def stop(self) -> None:
        """End generation; what was generated stays readable."""
        await self._end("StopRequest")

    async def release(self) -> None:
        """End generation if it runs and forget the request; releasing twice is fine."""
        try:
            await self._end("ReleaseRequest")
        except StatusError as error:
            if error.status != pb.ALLSPARK_ILLEGAL_REQUEST_ID:
                raise

    async def _end(self, name: str) -> None:
        message = pb.StopRequestRequest(model_name=self.model, uuid=self.uuid)
        reply, trailing = await self._client.call(name, message)
        check_status(name, reply.as_status, trailing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except AllSparkError:
            if error is None:
                raise
