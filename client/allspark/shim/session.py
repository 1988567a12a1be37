"""One client of DashInfer 1.x: its view of models, its uuids, and its 22 methods."""

import asyncio
import sys
import time
import uuid as uuid_lib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import dashinfer_v1_pb2 as v1
from allspark_proto import metadata

from allspark.client import AccessDenied, AllSparkError, AsyncClient, StatusError
from allspark.client.calls import GET_WAIT_S, Progress
from allspark.shim import translate
from allspark.shim.settings import ShimSettings, Target

MODEL_TIMEOUT_S = 3600.0
#: How long GenerateStatus may hide the end from a reader that has not fetched the last tokens (spec 3.6).
DEFERRAL_S = 2.0
MAX_RELEASED = 4096
AT_ONCE = 64
_ENDED = (pb.GenerateFinished, pb.GenerateInterrupted)

Answer = Awaitable[Any]
#: Method -> type of its request, and the coroutine that answers.
Handlers = dict[str, tuple[type[Any], Callable[[Any], Answer]]]


class Refused(Exception):
    """A call that the client gets as an AS_STATUS."""

    def __init__(self, status: "pb.AS_STATUS.ValueType", reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class Model:
    """A model as this client has built it."""

    target: Target
    max_length: int  # 0: the fleet's own limit
    state: str = "built"  # built, running, stopped


@dataclass(slots=True)
class Live:
    """A request of this client that has not been released. `turn` makes concurrent reads share the tokens."""

    model: str  # as the client calls it
    fleet_uuid: str
    progress: Progress
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    end_seen_s: float = 0.0

    @property
    def key(self) -> pb.UUID:
        return pb.UUID(uuid=self.fleet_uuid)


class Session:
    """Answers the calls of one client; `num_ranks` is what it believes to have started."""

    def __init__(self, client: AsyncClient, settings: ShimSettings, num_ranks: int) -> None:
        self._client = client
        self._settings = settings
        self._num_ranks = num_ranks
        self._space = f"dashinfer-{uuid_lib.uuid4().hex[:16]}"  # its uuids are unique in the whole fleet
        self._serial = 0
        self._models: dict[str, Model] = {}
        self._live: dict[str, Live] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._starting: set[asyncio.Future[None]] = set()
        self.over = asyncio.Event()

    def handlers(self) -> Handlers:
        """All 22."""
        name, end, key, empty = pb.ModelName, pb.StopRequestRequest, pb.UUID, pb.Empty
        return {
            "BuildModelFromConfigStruct": (v1.ModelStructConfig, self.build),
            "StartModel": (name, self.start_model),
            "StopModel": (name, self.stop_model),
            "ReleaseModel": (name, self.release_model),
            "UnloadModelFromDeviceMemory": (name, self.keep_loaded),
            "ReloadModelToDeviceMemory": (name, self.keep_loaded),
            "GetModelInformation": (name, self._about("GetModelInformation")),
            "GetAsEngineStat": (name, self._about("GetAsEngineStat")),
            "GetOpProfilingInfo": (name, self._about("GetOpProfilingInfo")),
            "GetFileInformation": (pb.FileInformationRequest, self.file_information),
            "GetVersionFull": (empty, self.version),
            "GetRankId": (empty, self.rank_id),
            "GetRankNums": (empty, self.rank_nums),
            "ShutdownService": (empty, self.shut_down),
            "StartRequest": (pb.StartRequestRequest, self.start_request),
            "StopRequest": (end, self.stop_request),
            "ReleaseRequest": (end, self.release_request),
            "SyncRequest": (end, self.sync_request),
            "GenerateStatus": (key, self.status),
            "GeneratedLength": (key, self.length),
            "Get": (key, self.get),
            "GetNoWait": (key, self.get_no_wait),
        }

    # ---- models: the fleet's own, seen by this client under the names that it chose --------------------

    async def build(self, config: v1.ModelStructConfig) -> pb.AsStatus:
        """Finds the fleet's model of this name, or builds it where the shim was told from what."""
        target = self._settings.target(config.model_name) if config.model_name else None
        if target is None:
            raise Refused(
                pb.ALLSPARK_PARAM_ERROR,
                f"model {config.model_name!r} means nothing here: write the directory again with "
                f"--model {config.model_name or 'NAME'}=MODEL, where MODEL is a model of the fleet",
            )
        if config.engine_max_length < 0 or 0 < config.engine_max_length <= 2:
            raise Refused(pb.ALLSPARK_PARAM_ERROR, f"engine_max_length is {config.engine_max_length}")
        information, _ = await self._call("GetModelInformation", pb.ModelName(model_name=target.model))
        if not information.model_info:
            if not target.path:
                raise Refused(
                    pb.ALLSPARK_PARAM_ERROR,
                    f"model {target.model!r} is not built in the fleet: build it there first, or write the "
                    f"directory again with --model {config.model_name}={target.model}@PATH",
                )
            await self._status(
                "BuildModelFromConfigStruct", translate.model_config(config, target.model, target.path)
            )
        self._models[config.model_name] = Model(target, config.engine_max_length)
        return pb.AsStatus()

    async def start_model(self, name: pb.ModelName) -> pb.AsStatus:
        """The fleet's StartModel, which does nothing to a model that runs.

        A token that may not start models is enough for one that runs.
        """
        model = self._model(name.model_name)
        target = pb.ModelName(model_name=model.target.model)
        try:
            await self._status("StartModel", target)
        except AccessDenied as denied:
            if not (await self._call("GetAsEngineStat", target))[0].total_span:
                reason = (
                    f"model {target.model_name!r} does not run in the fleet, and this token cannot start it"
                )
                raise Refused(pb.ALLSPARK_REQUEST_DENIED, f"{reason}: {denied}") from denied
        model.state = "running"
        return pb.AsStatus()

    async def stop_model(self, name: pb.ModelName) -> pb.AsStatus:
        """Waits for this client's requests; the fleet's model goes on for everybody else."""
        model = self._model(name.model_name)
        model.state = "stopped" if model.state == "running" else model.state
        left = [live for live in self._live.values() if live.model == name.model_name]
        for live in left:
            await self._sync(live)
        return pb.AsStatus(as_status=pb.ALLSPARK_RUNTIME_ERROR if left else pb.ALLSPARK_SUCCESS)

    async def release_model(self, name: pb.ModelName) -> pb.AsStatus:
        """Stops if need be, and forgets the name."""
        await self.stop_model(name)
        del self._models[name.model_name]
        return pb.AsStatus()

    async def keep_loaded(self, name: pb.ModelName) -> pb.AsStatus:
        """Unload and Reload, which this generation never sends: the model is not this client's."""
        self._model(name.model_name)
        raise Refused(pb.ALLSPARK_INVALID_CALL_ERROR, "the model is the fleet's: no client can unload it")

    def _model(self, name: str) -> Model:
        if name not in self._models:
            raise Refused(pb.ALLSPARK_INVALID_CALL_ERROR, f"model {name!r} was not built by this program")
        return self._models[name]

    def _about(self, rpc: str) -> Callable[[pb.ModelName], Answer]:
        async def ask(name: pb.ModelName) -> Any:
            model = self._models.get(name.model_name)
            answer, _ = await self._call(rpc, pb.ModelName(model_name=model.target.model if model else ""))
            if isinstance(answer, pb.AsEngineStat):
                answer.model_name = name.model_name
            return answer

        return ask

    # ---- the service -----------------------------------------------------------------------------------

    async def version(self, _: pb.Empty) -> pb.VersionInfo:
        """The fleet's."""
        answer: pb.VersionInfo = (await self._call("GetVersionFull", pb.Empty()))[0]
        return answer

    async def file_information(self, _: pb.FileInformationRequest) -> pb.FileInformationResponse:
        """The files are not used, so they are never of another version than the engine."""
        version = (await self.version(pb.Empty())).version_info.partition("/")[0]
        return pb.FileInformationResponse(
            create_version_graph=version, create_version_param=version, current_version_engine=version
        )

    async def rank_id(self, _: pb.Empty) -> pb.RankId:
        """The rank that answers."""
        return pb.RankId(rank_id=0)

    async def rank_nums(self, _: pb.Empty) -> pb.RankId:
        """0 until this client has built a model: it would shut down what answers anything else."""
        return pb.RankId(rank_id=self._num_ranks if self._models else 0)

    async def shut_down(self, _: pb.Empty) -> pb.AsStatus:
        """This client leaves; the fleet stays."""
        self.over.set()
        return pb.AsStatus()

    # ---- requests ----------------------------------------------------------------------------------------

    async def start_request(self, request: pb.StartRequestRequest) -> pb.StartRequestResponse:
        """Submits under a uuid of our own; the client's uuid counts in this session only."""
        model = self._models.get(request.model_name)
        if model is None:
            raise Refused(
                pb.ALLSPARK_PARAM_ERROR, f"model {request.model_name!r} was not built by this program"
            )
        if model.state != "running":
            is_stopped = model.state == "stopped"
            status = pb.ALLSPARK_REQUEST_DENIED if is_stopped else pb.ALLSPARK_INVALID_CALL_ERROR
            raise Refused(status, f"model {request.model_name!r} is {model.state}")
        self._check_length(request, model)
        self._serial += 1
        fresh = f"{self._space}-{self._serial}"
        uuid = fresh if request.config.uuid in translate.DEFAULT_UUIDS else request.config.uuid
        live = self._live.setdefault(uuid, Live(request.model_name, fresh, Progress(fresh)))
        request.model_name, request.config.uuid = model.target.model, live.fleet_uuid
        try:
            await self._submit(request)
        except Refused:
            if live.fleet_uuid == fresh:
                del self._live[uuid]
            raise
        self._released.pop(uuid, None)
        return pb.StartRequestResponse(uuid=uuid)

    async def _submit(self, request: pb.StartRequestRequest) -> None:
        """Goes on if the client leaves meanwhile: only a request whose start is over can be released."""
        start = asyncio.ensure_future(self._status("StartRequest", request))
        self._starting.add(start)
        start.add_done_callback(self._starting.discard)
        await asyncio.shield(start)

    def _check_length(self, request: pb.StartRequestRequest, model: Model) -> None:
        """The length that this client built its model with is a limit for this client."""
        limit = model.max_length
        if limit == 0:
            return
        num_prompt = translate.prompt_length(request)
        if num_prompt > limit - 2 or request.config.max_length > limit:
            raise Refused(
                pb.ALLSPARK_EXCEED_LIMIT_ERROR,
                f"{num_prompt} prompt tokens, max_length {request.config.max_length}: the model was built "
                f"with engine_max_length {limit}",
            )
        request.config.max_length = request.config.max_length or limit

    async def stop_request(self, call: pb.StopRequestRequest) -> pb.StartRequestResponse:
        """Ends it; its tokens stay readable."""
        live = self._live.get(call.uuid)
        if live is not None:
            await self._status("StopRequest", pb.StopRequestRequest(uuid=live.fleet_uuid))
        elif call.uuid not in self._released:
            raise Refused(pb.ALLSPARK_ILLEGAL_REQUEST_ID, f"uuid {call.uuid!r} is unknown")
        return pb.StartRequestResponse(uuid=call.uuid)

    async def release_request(self, call: pb.StopRequestRequest) -> pb.StartRequestResponse:
        """Ends it if need be and forgets it."""
        live = self._live.get(call.uuid)
        if live is None and call.uuid not in self._released:
            raise Refused(pb.ALLSPARK_ILLEGAL_REQUEST_ID, f"uuid {call.uuid!r} is unknown")
        if live is not None:
            await self._status("ReleaseRequest", pb.StopRequestRequest(uuid=live.fleet_uuid))
            self._live.pop(call.uuid, None)
            self._released[call.uuid] = None
            while len(self._released) > MAX_RELEASED:
                self._released.popitem(last=False)
        return pb.StartRequestResponse(uuid=call.uuid)

    async def sync_request(self, call: pb.StopRequestRequest) -> pb.StartRequestResponse:
        """Waits for one request, or without a uuid for all that this client has."""
        if call.uuid and call.uuid not in self._live and call.uuid not in self._released:
            raise Refused(pb.ALLSPARK_ILLEGAL_REQUEST_ID, f"uuid {call.uuid!r} is unknown")
        for live in [r for uuid, r in self._live.items() if call.uuid in ("", uuid)]:
            await self._sync(live)
        return pb.StartRequestResponse(uuid=call.uuid)

    async def _sync(self, live: Live) -> None:
        message = pb.StopRequestRequest(uuid=live.fleet_uuid)
        await self._call("SyncRequest", message, timeout_s=MODEL_TIMEOUT_S)

    # ---- results -----------------------------------------------------------------------------------------

    async def status(self, key: pb.UUID) -> pb.GenerateRequestStatus:
        """The fleet's; the end is told a reader once it has the last tokens, or a bounded time later."""
        live = self._live.get(key.uuid)
        if live is None:
            return pb.GenerateRequestStatus(status=pb.GenerateInterrupted)
        answer: pb.GenerateRequestStatus = (await self._call("GenerateStatus", live.key))[0]
        if answer.status in _ENDED and live.progress.received and not live.progress.is_ended:
            live.end_seen_s = live.end_seen_s or time.monotonic()
            length, _ = await self._call("GeneratedLength", live.key)
            if length.len > live.progress.received and time.monotonic() - live.end_seen_s < DEFERRAL_S:
                answer.status = pb.Generating
        return answer

    async def length(self, key: pb.UUID) -> pb.GenerateLen:
        """Tokens so far, read or not."""
        live = self._live.get(key.uuid)
        if live is None:
            return pb.GenerateLen()
        answer: pb.GenerateLen = (await self._call("GeneratedLength", live.key))[0]
        return answer

    async def get(self, key: pb.UUID) -> pb.GeneratedElements:
        """Waits for tokens; null when there are no more."""
        live = self._live.get(key.uuid)
        if live is None:
            return translate.elements([])
        ids: list[int] = []
        async with live.turn:
            while not ids and not live.progress.is_ended and self._live.get(key.uuid) is live:
                ids = await self._read(self._client.wait_for_tokens(live.key, live.progress, GET_WAIT_S))
        return translate.elements(ids)

    async def get_no_wait(self, key: pb.UUID) -> pb.GeneratedElements:
        """What is there; null when nothing is, or when a Get waits for it already."""
        live = self._live.get(key.uuid)
        if live is None or live.turn.locked() or live.progress.is_ended:
            return translate.elements([])
        async with live.turn:
            return translate.elements(await self._read(self._poll(live)))

    async def _poll(self, live: Live) -> list[int]:
        answer = await self._client.call("GetNoWait", live.key, metadata=live.progress.metadata())
        return live.progress.accept(*answer)

    async def _read(self, reading: Awaitable[list[int]]) -> list[int]:
        """A request that is released while it is read has no more tokens."""
        try:
            return await reading
        except StatusError as error:
            if error.status != pb.ALLSPARK_ILLEGAL_REQUEST_ID:
                raise
            return []

    # ---- parts -------------------------------------------------------------------------------------------

    async def _call(
        self, rpc: str, message: object, timeout_s: float | None = None
    ) -> tuple[Any, dict[str, str]]:
        return await self._client.call(rpc, message, timeout_s=timeout_s)

    async def _status(self, rpc: str, message: object) -> None:
        """A call whose refusal is passed on with its reason."""
        answer, trailing = await self._call(rpc, message, timeout_s=MODEL_TIMEOUT_S)
        if answer.as_status != pb.ALLSPARK_SUCCESS:
            raise Refused(answer.as_status, metadata.decode_text(trailing.get(metadata.REASON, "")))

    async def release_all(self) -> None:
        """The client is gone: ends and forgets every request that it left."""
        if self._starting:
            await asyncio.wait(self._starting)
        left, self._live = list(self._live.values()), {}
        for i in range(0, len(left), AT_ONCE):
            releases = [self._release_left(live) for live in left[i : i + AT_ONCE]]
            await asyncio.gather(*releases)

    async def _release_left(self, live: Live) -> None:
        try:
            await self._call("ReleaseRequest", pb.StopRequestRequest(uuid=live.fleet_uuid))
        except AllSparkError as error:
            sys.stderr.write(f"allspark: request {live.fleet_uuid} could not be released: {error}\n")
