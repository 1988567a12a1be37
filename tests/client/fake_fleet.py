"""A scripted AllSpark service on real gRPC servers: what a client may meet, without a fleet."""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata
from allspark_proto.allspark_service_pb2_grpc import AllSparkServicer, add_AllSparkServicer_to_server

WAIT_S = 30.0


class Script:
    """What happens to one request: its tokens in publishing order, and its end."""

    def __init__(self, tokens: list[int], reason: str = "eos", chunk: int = 3) -> None:
        self.tokens = tokens
        self.reason = reason
        self.chunk = chunk
        self.message = ""


class FakeFleet:
    """State shared by all gateways, as Redis is.

    ``lose(n)``: the next n answers of Get are computed, move the server's cursor and never arrive.
    ``frozen``: numbers of gateways whose Gets are never answered.
    ``has_metadata`` False: a server that knows neither cursor nor finish reason.
    """

    def __init__(self, num_gateways: int = 1, *, has_metadata: bool = True) -> None:
        self.scripts: dict[str, Script] = {}
        self.started: list[pb.StartRequestRequest] = []
        self.released: list[str] = []
        self.stopped: list[str] = []
        self.calls: list[tuple[int, str]] = []
        self.has_metadata = has_metadata
        self.next_script: Callable[[], Script] = lambda: Script([1, 2, 3, 4, 5, 6, 7])
        self.refusal: tuple[int, str] | None = None
        self.failures: dict[str, list[grpc.StatusCode]] = {}
        self.frozen: set[int] = set()
        self.lock = threading.Lock()
        self._cursors: dict[str, int] = {}
        self._lost = 0
        self._servers: list[grpc.Server] = []
        self.addresses: list[str] = []
        for index in range(num_gateways):
            server = grpc.server(futures.ThreadPoolExecutor(8))
            add_AllSparkServicer_to_server(_Gateway(self, index), server)
            self.addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            server.start()
            self._servers.append(server)

    def lose(self, count: int) -> None:
        self._lost = count

    def stop_gateway(self, index: int) -> None:
        self._servers[index].stop(grace=None).wait()

    def close(self) -> None:
        for server in self._servers:
            server.stop(grace=None).wait()

    def get(self, uuid: str, context: Any) -> pb.GeneratedElements:
        script = self.scripts.get(uuid)
        if script is None or uuid in self.released:
            return pb.GeneratedElements(empty=1)
        sent = dict(context.invocation_metadata())
        own = sent.get(metadata.CURSOR) if self.has_metadata else None
        start = int(own) if own is not None else self._cursors.get(uuid, 0)
        end = min(start + script.chunk, len(script.tokens))
        self._cursors[uuid] = end
        if self._lost:
            self._lost -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        if end == len(script.tokens) and self.has_metadata:
            trailing = [(metadata.FINISH_REASON, script.reason)]
            if script.message:
                trailing.append((metadata.REASON, metadata.encode_text(script.message)))
            context.set_trailing_metadata(trailing)
        return pb.GeneratedElements(ids_from_generate=script.tokens[start:end])


class _Gateway(AllSparkServicer):
    def __init__(self, fleet: FakeFleet, index: int) -> None:
        self._fleet = fleet
        self._index = index

    def _enter(self, name: str, context: Any) -> None:
        with self._fleet.lock:
            self._fleet.calls.append((self._index, name))
            code = self._fleet.failures[name].pop(0) if self._fleet.failures.get(name) else None
            if name == "Get" and self._index in self._fleet.frozen:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # answer too late: wait until the client has given up
            deadline = time.monotonic() + WAIT_S
            while context.is_active() and time.monotonic() < deadline:
                time.sleep(0.01)
        elif code is not None:
            context.abort(code, f"scripted {code.name}")

    def StartRequest(self, request: pb.StartRequestRequest, context: Any) -> pb.StartRequestResponse:
        with self._fleet.lock:
            uuid = request.config.uuid
            if self._fleet.refusal is not None:
                status, reason = self._fleet.refusal
                trailing = [(metadata.REASON, metadata.encode_text(reason)), (metadata.RETRY_AFTER_MS, "250")]
                context.set_trailing_metadata(trailing)
                return pb.StartRequestResponse(as_status=pb.AS_STATUS.ValueType(status), uuid=uuid)
            self._fleet.started.append(request)
            self._fleet.scripts.setdefault(uuid, self._fleet.next_script())
        self._enter("StartRequest", context)  # the answer may be lost after the request was recorded
        return pb.StartRequestResponse(uuid=uuid)

    def Get(self, request: pb.UUID, context: Any) -> pb.GeneratedElements:
        self._enter("Get", context)
        with self._fleet.lock:
            return self._fleet.get(request.uuid, context)

    def GenerateStatus(self, request: pb.UUID, context: Any) -> pb.GenerateRequestStatus:
        self._enter("GenerateStatus", context)
        finished = self._fleet.scripts[request.uuid].reason in metadata.FINISHED_REASONS
        return pb.GenerateRequestStatus(status=pb.GenerateFinished if finished else pb.GenerateInterrupted)

    def StopRequest(self, request: pb.StopRequestRequest, context: Any) -> pb.StartRequestResponse:
        self._enter("StopRequest", context)
        self._fleet.stopped.append(request.uuid)
        return pb.StartRequestResponse(uuid=request.uuid)

    def ReleaseRequest(self, request: pb.StopRequestRequest, context: Any) -> pb.StartRequestResponse:
        self._enter("ReleaseRequest", context)
        is_known = request.uuid in self._fleet.scripts
        self._fleet.released.append(request.uuid)
        status = pb.ALLSPARK_SUCCESS if is_known else pb.ALLSPARK_ILLEGAL_REQUEST_ID
        return pb.StartRequestResponse(as_status=status, uuid=request.uuid)

    def BuildModelFromConfigStruct(self, request: pb.ModelStructConfig, context: Any) -> pb.AsStatus:
        self._enter("BuildModelFromConfigStruct", context)
        is_there = request.model_path == "/models/there"
        return pb.AsStatus(as_status=pb.ALLSPARK_SUCCESS if is_there else pb.ALLSPARK_IO_ERROR)

    def GetVersionFull(self, request: pb.Empty, context: Any) -> pb.VersionInfo:
        self._enter("GetVersionFull", context)
        return pb.VersionInfo(version_info="0.0.0/(GitSha1:0000000)")
