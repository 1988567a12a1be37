"""Sections D, 2.4.10 and 1.5: adapters, named at Build or at their first use."""

from pathlib import Path

import pytest

from tests.conformance import oracle
from tests.conformance.server import IO, OK, PARAM, Server, request
from tests.conformance.suite import case

C = "GenerateConfig."
PROMPT = [5, 9, 6, 5, 9, 7, 5]
NEW = 24


@case("2.4.10", "ModelStructConfig.lora_names", "LoraNames.names", "GenerateConfig.lora_name")
def an_adapter_named_at_Build_serves_requests(s: Server) -> None:
    adapter = adapter_of(s)
    with s.model(lora_names=[adapter]) as name:
        adapted = s.generate(PROMPT, model=name, new=16, lora_name=adapter)
        assert adapted != s.generate(PROMPT, model=name, new=16)
        oracle.check_greedy(f"{s.reference_path}-merged", PROMPT, adapted)


def adapter_of(s: Server) -> str:
    """The adapter that lies beside the weights of the suite's own model."""
    if not (Path(s.reference_path) / "conformance-adapter").is_dir():
        pytest.skip("the target's model has no directory conformance-adapter")
    return "conformance-adapter"


@case("D", C + "lora_name")
def an_adapter_is_loaded_at_first_use_and_mixes_with_the_base(s: Server) -> None:
    adapter = adapter_of(s)
    with s.model() as name:
        mixed = [s.start(PROMPT, model=name, new=NEW, lora_name=adapter if i % 2 else "") for i in range(6)]
        results = [live.take_all() for live in mixed]
    assert results[0::2] == [s.generate(PROMPT, new=NEW)] * 3
    oracle.check_greedy(f"{s.reference_path}-merged", PROMPT, results[1])
    assert results[1::2] == [results[1]] * 3 and results[1] != results[0]


@case("1.5 #17", C + "lora_name")
def a_stopped_request_lets_its_adapter_go(s: Server) -> None:
    """More adapters than there is room for, one after another: none is held on to."""
    names = sorted(path.name for path in Path(s.reference_path).glob(f"{adapter_of(s)}*"))
    with s.model(engine_max_length=s.long) as name:
        stopped = []
        for adapter in names:
            live = s.start(PROMPT, model=name, max_length=s.long, lora_name=adapter)
            assert live.get().ids_from_generate, "it runs, so it has its adapter"
            assert live.stop() == OK
            stopped.append(live)
        for adapter in names:
            assert len(s.generate(PROMPT, model=name, lora_name=adapter)) == 8
        assert [live.release() for live in stopped] == [OK] * len(names)


@case("1.5 #15", C + "lora_name", "ModelStructConfig.enable_prefix_cache")
def a_cached_prefix_is_not_that_of_another_adapter(s: Server) -> None:
    adapter, prompt = adapter_of(s), [3 + i % 90 for i in range(50)]
    adapted = s.generate(prompt, lora_name=adapter)
    oracle.check_greedy(f"{s.reference_path}-merged", prompt, adapted)
    with s.model(enable_prefix_cache=True, prefix_cache_ttl=300) as name:
        for _ in range(6):  # each worker has the prefix of the other kind
            assert s.generate(prompt, model=name) == s.generate(prompt)
            assert s.generate(prompt, model=name, lora_name=adapter) == adapted
        assert s.stat(name).prefix_cache_hit_token > 0


@case("2.4.10", "ModelStructConfig.lora_names", "AsStatus.as_status")
def an_adapter_that_is_no_directory_or_unreadable_is_refused(s: Server) -> None:
    """2: there is none. 3: there is something, but no adapter."""
    adapter_of(s)
    for names, status in ((["conformance-adapter", "conformance-none"], PARAM), (["conformance-broken"], IO)):
        assert s.build("conformance-refused", lora_names=names) == status
    with s.model() as name:
        assert s.refused(request(name, PROMPT, lora_name="conformance-broken")) == IO
