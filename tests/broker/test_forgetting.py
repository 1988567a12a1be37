"""What a broker remembers of a model goes with the model, through whichever broker it was released."""

from typing import Any
from unittest.mock import Mock

from allspark_broker.dispatcher import Dispatcher
from allspark_broker.fleet_view import EngineStats
from allspark_broker.queue import RequestQueue
from allspark_broker.work import Work
from allspark_broker.workers import Worker, WorkerTable
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet


def dispatcher() -> Dispatcher:
    unused: Any = Mock()
    table: Any = Mock(choose=Mock(return_value=None), holding=Mock(return_value=None))
    affinity: Any = Mock()
    return Dispatcher(unused, table, unused, lambda: RequestQueue(8), affinity, lambda _: Work(1))


def test_queues_and_waits_of_released_models_are_forgotten_unless_somebody_waits() -> None:
    d = dispatcher()
    for name in ("served", "released", "awaited"):
        assert d.reserve(pb.StartRequestRequest(model_name=name), f"default/{name}", Work(1)) is None
        d.waits[name].began()
        d.forecasts[name].sent(Work(1))
    d.give_up(None, "served", "default/served")
    d.give_up(None, "released", "default/released")
    d.keep({"served"})
    assert set(d.queues) == set(d.waits) == set(d.forecasts) == {"served", "awaited"}
    d.give_up(None, "awaited", "default/awaited")
    d.keep({"served"})
    assert set(d.queues) == set(d.waits) == set(d.forecasts) == {"served"}


def test_counters_of_workers_that_left_are_forgotten_with_their_model() -> None:
    stats, table = EngineStats(), WorkerTable(5.0, lambda: 0.0)
    announce = fleet.Announce(
        models=[fleet.WorkerModel(name="m", stat=pb.AsEngineStat(total_generated_token=7))]
    )
    worker, _ = table.announce("w", announce)
    assert isinstance(worker, Worker)
    stats.retire(worker)
    table.remove("w")
    stats.keep({"m"})
    assert stats.of("m", table, 0).total_generated_token == 7
    stats.keep(set())
    assert stats.of("m", table, 0).total_generated_token == 0
