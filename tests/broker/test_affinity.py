"""Requests go where their leading blocks were computed, as long as that does not unbalance the load."""

import random
from collections import Counter
from typing import Any

import numpy as np
from allspark_broker.affinity import ADAPTER_TTL_S, BLOCK_TOKENS, MAX_BLOCKS, PrefixAffinity
from allspark_broker.workers import LOAD_FACTOR, Flight, Worker, WorkerTable
from allspark_bus.catalogue import ModelRecord, ModelState
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def affinity(clock: Clock | None = None, **config: Any) -> PrefixAffinity:
    settings = {"enable_prefix_cache": True, "prefix_cache_ttl": 300} | config
    records = {
        name: ModelRecord(name, pb.ModelStructConfig(**settings).SerializeToString(), ModelState.RUNNING)
        for name in ("m", "n")
    }
    return PrefixAffinity(records.get, clock or Clock())


def request(prompt: list[int], model: str = "m", **config: Any) -> pb.StartRequestRequest:
    r = pb.StartRequestRequest(model_name=model, config=pb.GenerateConfig(**config))
    tensor = r.inputs.tensor_map["input_ids"]
    tensor.CopyFrom(pb.Tensor(data_type=pb.INT64, data=np.asarray(prompt, "<i8").tobytes()))
    tensor.shape.dims[:] = [1, len(prompt)]
    return r


BLOCKS = [[n] * BLOCK_TOKENS for n in range(9)]


def chain(*numbers: int) -> list[int]:
    """A prompt of whole blocks and one more token."""
    return [token for n in numbers for token in BLOCKS[n]] + [99]


def test_the_longest_shared_prefix_is_found_per_worker() -> None:
    a = affinity()
    a.record(a.prefix(request(chain(1, 2, 3))), "deep")
    a.record(a.prefix(request(chain(1, 5))), "shallow")
    assert a.matches(a.prefix(request(chain(1, 2, 4)))) == {"deep": 2, "shallow": 1}
    assert a.matches(a.prefix(request(chain(2, 3)))) == {}, "the same blocks at other places"
    assert a.matches(a.prefix(request([1] * (BLOCK_TOKENS - 1)))) == {}, "no full block"


def test_a_block_that_holds_the_last_token_does_not_count() -> None:
    a = affinity()
    assert len(a.prefix(request(BLOCKS[1])).keys) == 0
    assert len(a.prefix(request([*BLOCKS[1], 1])).keys) == 1


def test_model_adapter_mode_and_embeddings_are_told_apart() -> None:
    a = affinity()
    prompt = chain(1)
    rich = []
    for value in (b"1234", b"1235"):
        r = request(prompt)
        r.mm_type = pb.MultiMediaTypeRichText
        r.inputs.tensor_map["7"].data = value
        rich.append(r)
    others = [request(prompt), request(prompt, "n"), request(prompt, lora_name="x"), *rich]
    keys = [a.prefix(r).keys[0] for r in others]
    keys.append(affinity(cache_mode=1).prefix(request(prompt)).keys[0])
    assert len(set(keys)) == len(keys)
    attention_mask = request(prompt)
    attention_mask.inputs.tensor_map["attention_mask"].data = b"1"
    assert a.prefix(attention_mask).keys[0] == keys[0], "a text request's other tensors are not embeddings"


def test_no_affinity_without_a_cache_that_outlives_its_users() -> None:
    for config in ({"enable_prefix_cache": False}, {"prefix_cache_ttl": 0}):
        assert affinity(**config).prefix(request(chain(1, 2))).keys == ()
    a = affinity()
    assert a.prefix(request(chain(1), "unknown")).keys == ()
    assert a.prefix(pb.StartRequestRequest(model_name="m")).keys == ()


def test_what_a_worker_has_forgotten_by_now_attracts_nothing() -> None:
    clock = Clock()
    a = affinity(clock, prefix_cache_ttl=10)
    prefix = a.prefix(request(chain(1)))
    a.record(prefix, "w")
    clock.now = 10.0
    assert a.matches(prefix) == {"w": 1}
    clock.now = 10.1
    assert a.matches(prefix) == {}
    a.record(prefix, "w")
    assert a.matches(prefix) == {"w": 1}


def test_memory_is_bounded_and_forgets_the_oldest_prefix_from_its_end() -> None:
    clock = Clock()
    record = ModelRecord(
        "m",
        pb.ModelStructConfig(enable_prefix_cache=True, prefix_cache_ttl=300).SerializeToString(),
        ModelState.RUNNING,
    )
    a = PrefixAffinity({"m": record}.get, clock, max_keys=4)
    old, new = a.prefix(request(chain(1, 2, 3))), a.prefix(request(chain(4, 5)))
    a.record(old, "w")
    a.record(new, "v")
    assert len(a) == 4
    assert a.matches(old) == {"w": 2} and a.matches(new) == {"v": 2}
    for n in range(100):
        a.record(new, f"w{n}")
    assert len(a.matches(new)) == 8
    assert len(a.prefix(request([1] * 32 * 2 * MAX_BLOCKS)).keys) == MAX_BLOCKS


def table(*names: str, capacity: int = 100) -> WorkerTable:
    workers = WorkerTable(1e9, Clock())
    for name in names:
        model = fleet.WorkerModel(name="m", state="running", capacity=capacity)
        workers.announce(name, fleet.Announce(device="cpu", models=[model]))
    return workers


def send(worker: Worker, count: int) -> None:
    for _ in range(count):
        rid = f"{worker.worker_id}-{len(worker.flights)}"
        worker.flights[rid] = Flight(rid, "m", 1, 0.0)


def test_an_idle_fleet_follows_the_prefix_and_a_longer_match_wins() -> None:
    workers = table("a", "b", "c")
    for prefer, expected in (({"c": 1}, "c"), ({"b": 1, "c": 2}, "c"), ({"gone": 3}, "a"), ({}, "a")):
        worker = workers.choose("m", prefer=prefer)
        assert worker is not None and worker.worker_id == expected


def test_affinity_does_not_overload_a_worker() -> None:
    workers = table("a", "b")
    b = workers.get("b")
    assert b is not None
    send(b, 2)  # 1.25 times the mean after this request is 1.875: two are enough
    worker = workers.choose("m", prefer={"b": 50})
    assert worker is not None and worker.worker_id == "a"
    full = table("a", "b", capacity=1)
    busy = full.get("b")
    assert busy is not None
    send(busy, 1)
    worker = full.choose("m", prefer={"b": 50})
    assert worker is not None and worker.worker_id == "a", "a worker without room is not chosen"


def test_one_popular_prefix_still_spreads_over_the_fleet() -> None:
    workers = table("a", "b", "c", "d")
    a = affinity()
    rng = random.Random(5)
    for n in range(200):
        prefix = a.prefix(request(chain(rng.choice([1, 1, 1, 2]), 3)))
        worker = workers.choose("m", prefer=a.matches(prefix))
        assert worker is not None
        a.record(prefix, worker.worker_id)
        worker.flights[str(n)] = Flight(str(n), "m", 1, 0.0)
    loads = [w.load("m") for w in workers]
    assert max(loads) <= LOAD_FACTOR * 200 / 4 + 1, loads


def test_conversations_stay_with_their_worker() -> None:
    """Turns of many conversations in any order: each lands where its earlier turns were computed."""
    workers = table("a", "b", "c")
    a = affinity()
    rng = random.Random(3)
    conversations = {n: [rng.randrange(9) for _ in range(4)] for n in range(30)}
    visited: dict[int, Counter[str]] = {n: Counter() for n in conversations}
    for turn in range(1, 5):
        for n in rng.sample(sorted(conversations), len(conversations)):
            prompt = [1000 + n, *chain(*conversations[n][:turn])]
            prefix = a.prefix(request(prompt))
            worker = workers.choose("m", prefer=a.matches(prefix))
            assert worker is not None
            a.record(prefix, worker.worker_id)
            visited[n][worker.worker_id] += 1
    assert all(len(seen) == 1 for seen in visited.values())


def test_requests_with_an_adapter_go_where_it_was_loaded() -> None:
    """Whatever their prompts, also without a prefix cache; a longer shared prefix still wins."""
    for config in ({}, {"enable_prefix_cache": False}, {"prefix_cache_ttl": 0}):
        a = affinity(**config)
        a.record(a.prefix(request([1, 2], lora_name="x")), "loaded")
        assert a.matches(a.prefix(request([7, 8, 9], lora_name="x"))) == {"loaded": 1}
        assert a.matches(a.prefix(request([1, 2], lora_name="y"))) == {}
        assert a.matches(a.prefix(request([1, 2], model="n", lora_name="x"))) == {}
        assert a.matches(a.prefix(request([1, 2]))) == {}
    a = affinity()
    a.record(a.prefix(request(chain(1, 2), lora_name="x")), "deep")
    a.record(a.prefix(request(chain(5), lora_name="x")), "loaded")
    assert a.matches(a.prefix(request(chain(1, 2, 3), lora_name="x"))) == {"deep": 3, "loaded": 1}


def test_an_adapter_is_not_counted_on_for_ever() -> None:
    clock = Clock()
    a = affinity(clock, enable_prefix_cache=False)
    prefix = a.prefix(request([1, 2], lora_name="x"))
    a.record(prefix, "w")
    clock.now = ADAPTER_TTL_S
    assert a.matches(prefix) == {"w": 1}
    clock.now += 0.1
    assert a.matches(prefix) == {}
