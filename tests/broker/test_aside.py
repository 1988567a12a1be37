"""When a broker that reaches no worker leaves the field to another one; real Valkey, own clock."""

import random

import pytest
from allspark_broker.aside import PATIENCE_S, START_S, Aside
from allspark_bus.errors import BrokerUnavailable
from allspark_bus.store import Store

from tests.broker.parts import RID, Broker

LATER_S = max(PATIENCE_S) + 0.1


def aside_of(broker: Broker) -> Aside:
    return Aside(broker.table, broker.presence, broker.clock)


async def holds(aside: Aside, broker: Broker, seconds_later: float = 0.0) -> bool:
    broker.clock.now += seconds_later
    held = await aside.holds()
    if held:
        with pytest.raises(BrokerUnavailable, match="reaches no worker"):
            aside.check()
    else:
        aside.check()
    return held


async def test_a_broker_that_lost_its_workers_leaves_its_requests_to_another_one(store: Store) -> None:
    lonely, other = await Broker("lonely", store).settled(), await Broker("other", store).settled()
    aside = aside_of(lonely)
    lonely.announce("w")
    assert not await holds(aside, lonely, START_S + LATER_S)
    other.announce("w")
    await other.attend()
    lonely.table.remove("w")
    await lonely.admit()
    await lonely.dispatcher.claim(RID, 0)
    assert not await holds(aside, lonely), "a worker may be about to come"
    assert await holds(aside, lonely, LATER_S)
    await other.attend()
    assert other.link.dispatched == [("w", RID)]
    assert await holds(aside, lonely, LATER_S)
    lonely.announce("w")
    assert not await holds(aside, lonely)
    await lonely.dispatcher.pump_all()
    assert lonely.link.dispatched == [], "what it had queued is not its own any more"


async def test_a_worker_that_acknowledges_nothing_is_not_reached(store: Store) -> None:
    lonely, other = await Broker("lonely", store).settled(), await Broker("other", store).settled()
    aside = aside_of(lonely)
    lonely.announce("w")
    await other.presence.renew()
    assert not await holds(aside, lonely, START_S + LATER_S)
    worker = lonely.table.get("w")
    assert worker is not None
    worker.is_mute = True
    assert not await holds(aside, lonely)
    assert await holds(aside, lonely, LATER_S)
    lonely.announce("w")
    assert not await holds(aside, lonely)


async def test_without_another_broker_it_stays(store: Store) -> None:
    lonely, other = await Broker("lonely", store).settled(), await Broker("other", store).settled()
    aside = aside_of(lonely)
    assert not await holds(aside, lonely, START_S - 1), "workers are still looking for it"
    assert await holds(aside, lonely, LATER_S)
    await other.presence.leave()
    assert not await holds(aside, lonely)
    await other.presence.renew()
    assert not await holds(aside, lonely)
    assert await holds(aside, lonely, LATER_S)
    await other.presence.leave()
    lonely.clock.now += LATER_S
    assert not await holds(aside, lonely)
    for _ in range(3):
        assert not await holds(aside, lonely, LATER_S)


async def test_of_brokers_that_all_reach_no_worker_one_stays(store: Store) -> None:
    random.seed(7)
    brokers = [await Broker(f"b{i}", store).settled() for i in range(3)]
    asides = [aside_of(b) for b in brokers]
    held: list[bool] = []
    for _ in range(100):
        held = []
        for aside, broker in zip(asides, brokers, strict=True):
            held.append(await holds(aside, broker, 0.5))
            if not held[-1]:
                await broker.presence.renew()
        if held.count(False) == 1:
            break
    assert held.count(False) == 1
    stays = held.index(False)
    for _ in range(5):
        for i, (aside, broker) in enumerate(zip(asides, brokers, strict=True)):
            assert await holds(aside, broker, LATER_S) == (i != stays)
        await brokers[stays].presence.renew()
