"""A worker is asked about an adapter or a document before a request is recorded; good answers are kept."""

import pytest
from allspark_broker.admission import MAX_ADAPTER_NAME_BYTES, check_adapter_name
from allspark_broker.build import check_config
from allspark_broker.worker_checks import MAX_REMEMBERED, REMEMBER_S, WorkerChecks
from allspark_broker.workers import WorkerTable
from allspark_bus.catalogue import ModelRecord, ModelState
from allspark_bus.errors import BrokerUnavailable, FleetError
from allspark_bus.response_format import Document
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet


class Fixture:
    """A broker's view: workers, what they answer, and the questions they got."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[str, str, str]] = []
        self.answer = fleet.ControlReply()
        self.is_silent = False
        self.table = WorkerTable(5.0, lambda: self.now_s)
        self.check = WorkerChecks(self.table, self.control, lambda: self.now_s)

    def add_worker(self, name: str, state: str = "running", model: str = "m") -> None:
        self.table.announce(name, fleet.Announce(models=[fleet.WorkerModel(name=model, state=state)]))

    async def control(self, worker: str, call: fleet.ControlCall) -> fleet.ControlReply:
        if call.WhichOneof("call") == "check_document":
            self.asked.append((worker, call.check_document.kind, call.check_document.text))
        else:
            self.asked.append((worker, call.check_adapter.model_name, call.check_adapter.lora_name))
        if self.is_silent:
            raise BrokerUnavailable("no answer")
        return self.answer


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def record(generation: int = 1) -> ModelRecord:
    return ModelRecord("m", b"", ModelState.RUNNING, generation)


async def test_a_good_answer_is_remembered_for_a_while(fixture: Fixture) -> None:
    fixture.add_worker("w")
    for _ in range(3):
        await fixture.check.adapter(record(), "a")
    assert fixture.asked == [("w", "m", "a")]
    await fixture.check.adapter(record(), "b")
    await fixture.check.adapter(record(2), "a")
    assert len(fixture.asked) == 3, "another adapter, another version of the model"
    fixture.now_s = REMEMBER_S
    await fixture.check.adapter(record(), "a")
    assert len(fixture.asked) == 4


async def test_a_bad_answer_is_passed_on_and_asked_again(fixture: Fixture) -> None:
    fixture.add_worker("w")
    fixture.answer = fleet.ControlReply(as_status=pb.ALLSPARK_EXCEED_LIMIT_ERROR, reason="rank 100")
    for _ in range(2):
        with pytest.raises(FleetError, match="rank 100") as e:
            await fixture.check.adapter(record(), "a")
        assert e.value.status == pb.ALLSPARK_EXCEED_LIMIT_ERROR
    assert len(fixture.asked) == 2
    fixture.answer = fleet.ControlReply()
    await fixture.check.adapter(record(), "a")


async def test_only_workers_that_run_the_model_are_asked(fixture: Fixture) -> None:
    await fixture.check.adapter(record(), "a")
    fixture.add_worker("loading", "building")
    fixture.add_worker("other", model="n")
    await fixture.check.adapter(record(), "a")
    assert fixture.asked == [], "nobody can say: the worker that takes the request decides"
    fixture.add_worker("ready")
    await fixture.check.adapter(record(), "a")
    assert fixture.asked == [("ready", "m", "a")]


async def test_a_silent_worker_does_not_stop_requests_and_is_not_remembered(fixture: Fixture) -> None:
    fixture.add_worker("w")
    fixture.is_silent = True
    await fixture.check.adapter(record(), "a")
    fixture.is_silent = False
    await fixture.check.adapter(record(), "a")
    assert len(fixture.asked) == 2


async def test_what_is_remembered_is_bounded(fixture: Fixture) -> None:
    fixture.add_worker("w")
    for i in range(MAX_REMEMBERED + 10):
        await fixture.check.adapter(record(), f"a{i}")
    assert len(fixture.check._good) == MAX_REMEMBERED
    await fixture.check.adapter(record(), f"a{MAX_REMEMBERED + 9}")
    assert len(fixture.asked) == MAX_REMEMBERED + 10


async def test_a_document_is_asked_about_once_for_all_models(fixture: Fixture) -> None:
    fixture.add_worker("w")
    await fixture.check.document(record(), None)
    for generation in (1, 2):
        await fixture.check.document(record(generation), Document("regex", "a+"))
    await fixture.check.document(record(), Document("grammar", "a+"))
    assert fixture.asked == [("w", "regex", "a+"), ("w", "grammar", "a+")]
    fixture.answer = fleet.ControlReply(as_status=pb.ALLSPARK_PARAM_ERROR, reason="unclosed group")
    with pytest.raises(FleetError, match="unclosed group"):
        await fixture.check.document(record(), Document("regex", "("))


def test_names_that_cannot_be_names() -> None:
    check_adapter_name("lora_name", "ü" * (MAX_ADAPTER_NAME_BYTES // 2))
    for bad in ("x" * (MAX_ADAPTER_NAME_BYTES + 1), "ü" * (MAX_ADAPTER_NAME_BYTES // 2 + 1), "a\0b"):
        with pytest.raises(FleetError, match="lora_name"):
            check_adapter_name("lora_name", bad)
    config = pb.ModelStructConfig(model_name="m", model_path="p", lora_names=pb.LoraNames(names=["a"] * 1025))
    with pytest.raises(FleetError, match="1025 names") as e:
        check_config(config)
    assert e.value.status == pb.ALLSPARK_EXCEED_LIMIT_ERROR
