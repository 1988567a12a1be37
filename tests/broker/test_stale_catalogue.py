"""A broker whose copy of the catalogue is old does not deny what another broker has started meanwhile."""

import pytest
from allspark_broker.lifecycle import Lifecycle
from allspark_broker.workers import WorkerTable
from allspark_bus.catalogue import Catalogue, ModelRecord, ModelState
from allspark_bus.errors import ParamError
from allspark_bus.ledger import Ledger
from allspark_bus.store import Store


async def test_model_that_another_broker_started_is_looked_up_before_it_is_denied(store: Store) -> None:
    async def nudge() -> None:
        pass

    async def cancel(rid: str, model: str, worker: str) -> None:
        pass

    catalogue = Catalogue(store)
    late = Lifecycle(catalogue, Ledger(store), WorkerTable(5.0, lambda: 0.0), nudge, cancel, 1.0)
    await late.refresh()
    await catalogue.put(ModelRecord("m", b"", ModelState.RUNNING, owners=frozenset({"t"}), facts=b""))
    with pytest.raises(ParamError):
        late.serving("m")
    await late.make_sure("m")
    with pytest.raises(ParamError):
        late.serving("other")
    assert "m" in late.models
