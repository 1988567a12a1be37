"""The blocking client; safe to share between threads."""

import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import grpc
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


class Client:
    """Calls a fleet through any of its gateways.

    ``addresses``: one or several, ``HOST:PORT`` or ``unix:/path``. ``timeout_s`` bounds one try of a call,
    ``model_timeout_s`` one that loads or drains a model, ``retry_s`` the time without any answer after which
    ``FleetUnavailable`` is raised. ``access``: certificates and token, for a fleet that asks for them.
    """

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
        self._lock = threading.Lock()
        self._channels: dict[Place, grpc.Channel] = {}

    def submit(
        self,
        model: str,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        uuid: str | None = None,
    ) -> "Request":
        """Start generating; returns once the fleet has recorded the request.

        Raises ``StatusError`` if the fleet refuses it. The uuid is made here if none is given, so that a
        repeated submit after a lost answer runs once.
        """
        message = start_request_message(model, prompt, options or GenerateOptions(), uuid or uuid4().hex)
        reply, trailing = self.call("StartRequest", message)
        check_status("StartRequest", reply.as_status, trailing)
        return Request(self, model, reply.uuid)

    def attach(self, model: str, uuid: str, received: int = 0) -> "Request":
        """A request submitted earlier, or elsewhere; reading goes on after ``received`` tokens."""
        return Request(self, model, uuid, received)

    def build_model(
        self, name: str, path: str, options: ModelOptions | None = None, *, is_operator: bool = False
    ) -> None:
        """Load a model on the fleet's workers; returns when it is loaded.

        With ``is_operator`` it belongs to the fleet's operator: ShutdownService of no client releases it.
        """
        config = (options or ModelOptions()).to_config(name, path)
        self._status("BuildModelFromConfigStruct", config, OPERATOR if is_operator else ())

    def start_model(self, name: str) -> None:
        """Start serving a built model."""
        self._status("StartModel", pb.ModelName(model_name=name))

    def stop_model(self, name: str) -> None:
        """Drain a model and stop serving it."""
        self._status("StopModel", pb.ModelName(model_name=name))

    def release_model(self, name: str) -> None:
        """Free everything that belongs to a model."""
        self._status("ReleaseModel", pb.ModelName(model_name=name))

    def stat(self, model: str) -> pb.AsEngineStat:
        """Memory, queue and speed figures of a model, summed over its workers."""
        reply: pb.AsEngineStat = self.call("GetAsEngineStat", pb.ModelName(model_name=model))[0]
        return reply

    def version(self) -> str:
        """The fleet's version text; also a cheap test that a gateway answers."""
        return str(self.call("GetVersionFull", pb.Empty())[0].version_info)

    def sync(self, uuid: str = "") -> None:
        """Wait until a request (or, with an empty uuid, every request of this tenant) has ended."""
        message = pb.StopRequestRequest(uuid=uuid)
        reply, trailing = self.call("SyncRequest", message, timeout_s=self._model_timeout_s)
        check_status("SyncRequest", reply.as_status, trailing)

    def close(self) -> None:
        """Close the connections; requests live on."""
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def call(
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
                return self._once(place, name, message, timeout_s or self._timeout_s, metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.failed(place[0], error.code(), error.details() or ""))

    def wait_for_tokens(self, message: pb.UUID, progress: Progress, wait_s: float) -> list[int]:
        """One Get that waits at most ``wait_s``; an empty list means that nothing came in this time."""
        attempts = Attempts("Get", self._route)
        while True:
            place = attempts.place()
            try:
                reply, trailing = self._once(place, "Get", message, wait_s, progress.metadata())
                break
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._route.leave(place[0])
                    return []
                time.sleep(attempts.failed(place[0], error.code(), error.details() or ""))
        ids = progress.accept(reply, trailing)
        if not ids and not progress.is_ended:
            status, trailing = self.call("GenerateStatus", message)
            progress.accept_status(status.status, trailing)
        return ids

    def _once(
        self, place: Place, name: str, message: object, timeout_s: float, metadata: Sequence[tuple[str, str]]
    ) -> tuple[Any, dict[str, str]]:
        method = getattr(self._stub(place), name)
        reply, call = method.with_call(message, timeout=timeout_s, metadata=self._access.metadata(metadata))
        return reply, trailing_texts(call.trailing_metadata())

    def _status(self, name: str, message: object, metadata: Sequence[tuple[str, str]] = ()) -> None:
        reply, trailing = self.call(name, message, timeout_s=self._model_timeout_s, metadata=metadata)
        check_status(name, reply.as_status, trailing)

    def _stub(self, place: Place) -> AllSparkStub:
        with self._lock:
            if place not in self._channels:
                address, patience = place
                self._channels[place] = self._access.channel(address, channel_options(patience))
            return AllSparkStub(self._channels[place])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Request:
    """A request that the fleet accepted. As a context manager it is released at the end."""

    def __init__(self, client: Client, model: str, uuid: str, received: int = 0) -> None:
        self._client = client
        self.model = model
        self.uuid = uuid
        self.progress = Progress(uuid, received)

    @property
    def finish_reason(self) -> str:
        """Why generation ended; empty while it runs."""
        return self.progress.finish_reason

    def stream(self, timeout_s: float | None = None) -> Iterator[list[int]]:
        """New token ids as they are generated, until the end.

        Raises ``RequestInterrupted`` after the last tokens if generation did not finish, and ``TimeoutError``
        when nothing came for ``timeout_s``; in that case calling ``stream`` again goes on where it was.
        """
        message = pb.UUID(uuid=self.uuid)
        while not self.progress.is_ended:
            ids = self._next_tokens(message, timeout_s)
            if ids:
                yield ids
        self.progress.raise_if_interrupted()

    def _next_tokens(self, message: pb.UUID, timeout_s: float | None) -> list[int]:
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait_s = GET_WAIT_S if give_up is None else min(GET_WAIT_S, give_up - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError(f"request {self.uuid}: no token for {timeout_s:g} s")
            ids = self._client.wait_for_tokens(message, self.progress, wait_s)
            if ids or self.progress.is_ended:
                return ids

    def stream_text(self, timeout_s: float | None = None) -> Iterator[str]:
        """The text of a request whose prompt was text, as it is generated; raises as ``stream``.

        Pieces hold whole characters, and together they are the text of all tokens.
        """
        message = pb.UUID(uuid=self.uuid)
        while not self.progress.is_ended:
            self._next_tokens(message, timeout_s)
            if text := self.progress.take_text():
                yield text
        self.progress.raise_if_interrupted()

    def result(self, timeout_s: float | None = None) -> list[int]:
        """All token ids that are still to come."""
        return [token for ids in self.stream(timeout_s) for token in ids]

    def stop(self) -> None:
        """End generation; what was generated stays readable."""
        self._end("StopRequest")

    def release(self) -> None:
        """End generation if it runs and forget the request; releasing twice is fine."""
        try:
            self._end("ReleaseRequest")
        except StatusError as error:
            if error.status != pb.ALLSPARK_ILLEGAL_REQUEST_ID:
                raise

    def _end(self, name: str) -> None:
        reply, trailing = self._client.call(
            name, pb.StopRequestRequest(model_name=self.model, uuid=self.uuid)
        )
        check_status(name, reply.as_status, trailing)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except AllSparkError:
            if error is None:
                raise
