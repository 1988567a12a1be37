"""Sections 2.6.5 and 9: statistics, and what is left of the compatibility checklist."""

from allspark_proto import allspark_service_pb2 as pb

from tests.conformance import oracle
from tests.conformance.server import FINISHED, OK, PARAM, Server, request
from tests.conformance.suite import case

PROMPT = [5, 6, 7]
S = "AsEngineStat."


@case(
    "2.6.5",
    *(S + f for f in ("model_name", "total_span", "used_span", "free_span", "free_token", "span_size")),
)
def spans_add_up_and_have_the_size_of_upstream(s: Server) -> None:
    config = oracle.reference(s.reference_path).config
    with s.model(cache_span_size=16) as name:
        stat = s.stat(name)
        assert stat.model_name == name
        assert stat.total_span > 0 and stat.used_span == 0
        assert stat.free_span == stat.total_span
        assert stat.free_token == stat.free_span // (2 * config.num_hidden_layers) * 16
        assert stat.span_size == 16 * config.num_key_value_heads * config.head_dim * 4, "bytes of one frame"


@case("2.6.5", *(S + f for f in ("used_span", "free_span", "free_token", "running_request")))
def a_running_request_uses_spans(s: Server) -> None:
    with s.model(engine_max_length=s.long) as name:
        live = s.start(PROMPT, model=name, max_length=s.long)
        live.get()
        stat = s.stat(name)
        assert stat.running_request == 1 and stat.pendding_request == 0
        assert stat.used_span > 0 and stat.used_span + stat.free_span == stat.total_span
        assert live.release() == OK


@case("2.6.5", S + "total_device_memory_pool_size", S + "used_device_memory_pool_size")
def the_device_memory_budget(s: Server) -> None:
    stat = s.stat()
    assert stat.total_device_memory_pool_size >= stat.used_device_memory_pool_size > 0


@case("2.6.5", *(S + f for f in ("total_generated_token", "total_prefill_token")))
def token_counters_are_exact(s: Server) -> None:
    with s.model() as name:
        for _ in range(5):
            s.generate(PROMPT, model=name, new=11)
        stat = s.stat(name)
        assert (stat.total_generated_token, stat.total_prefill_token) == (55, 15)


@case("2.6.5", *(S + f for f in ("total_generated_token", "total_prefill_token")))
def token_counters_are_those_since_StartModel(s: Server) -> None:
    """An Unload and a Reload do not set them back, whatever was unloaded; a new StartModel does."""

    def counted() -> tuple[int, int]:
        stat = s.stat(name)
        return stat.total_generated_token, stat.total_prefill_token

    with s.model() as name:
        for _ in range(2):
            s.generate(PROMPT, model=name, new=11)
        for _ in range(2):
            assert s.status("UnloadModelFromDeviceMemory", name) == OK
            assert s.status("ReloadModelToDeviceMemory", name) == OK
        s.generate(PROMPT, model=name, new=11)
        assert counted() == (33, 9)
        assert (s.status("StopModel", name), counted()) == (OK, (33, 9)), "the last values"
        assert s.status("UnloadModelFromDeviceMemory", name) == OK
        assert (s.status("ReloadModelToDeviceMemory", name), counted()) == (OK, (33, 9))
        assert (s.status("StartModel", name), counted()) == (OK, (0, 0))
        s.generate(PROMPT, model=name, new=5)
        assert counted() == (5, 3)


@case("2.6.5", S + "generate_token_persec", S + "process_token_persec")
def rates_are_those_of_the_last_seconds(s: Server) -> None:
    with s.model() as name:
        s.generate([5] * 200, model=name, new=300)
        stat = s.stat(name)
        assert stat.generate_token_persec > 0 and stat.process_token_persec > 0


@case("2.6.5", *(S + f for f in ("prefix_cache_hit_rate", "prefix_cache_miss_rate")))
def rates_of_the_prefix_cache_are_zero_or_add_up_to_one(s: Server) -> None:
    with s.model(enable_prefix_cache=True, prefix_cache_ttl=300) as name:
        stat = s.stat(name)
        assert (stat.prefix_cache_hit_rate, stat.prefix_cache_miss_rate) == (0, 0), "none was asked"
        s.generate([3 + i % 90 for i in range(40)], model=name)
        stat = s.stat(name)
        assert (stat.prefix_cache_hit_rate, stat.prefix_cache_miss_rate) == (0, 1), "nothing was there yet"


@case("9 #1", "StartRequestRequest.inputs", "StartRequestRequest.config")
def the_descriptor_has_22_unary_methods_and_tag_5_is_free(s: Server) -> None:
    methods = pb.DESCRIPTOR.services_by_name["AllSpark"].methods
    assert len(methods) == 22
    assert not any(m.client_streaming or m.server_streaming for m in methods)
    assert 5 not in pb.StartRequestRequest.DESCRIPTOR.fields_by_number
    message = request(s.main, PROMPT)
    unknown = pb.StartRequestRequest.FromString(message.SerializeToString() + b"\x2a\x03abc")
    assert len(s.submit(unknown).take_all()) == 8, "an old client's tag 5 harms nothing"


@case("9 #2", "AsStatus.as_status", "StartRequestResponse.as_status")
def failures_are_in_as_status_with_a_reason_and_gRPC_OK(s: Server) -> None:
    for rpc, message in (
        ("BuildModelFromConfigStruct", pb.ModelStructConfig()),
        ("StartModel", pb.ModelName(model_name="conformance-nobody")),
        ("StartRequest", pb.StartRequestRequest()),
        ("StopRequest", pb.StopRequestRequest(uuid="conformance-never-seen")),
    ):
        answer, trailing = s.ask(rpc, message)
        assert answer.as_status != OK
        assert trailing["allspark-status"] == str(int(answer.as_status))
        assert trailing["allspark-reason"]


@case("9 #4", "GeneratedElements.ids_from_generate")
def tokens_are_new_ones_with_eos_and_without_the_prompt(s: Server) -> None:
    plain = s.generate(PROMPT, new=12)
    ended = s.generate(PROMPT, new=12, eos_token_id=plain[2], early_stopping=True)
    assert ended == plain[: plain.index(plain[2]) + 1]
    oracle.check_greedy(s.reference_path, PROMPT, plain)


@case("1.6", "GenerateLen.len", "GenerateRequestStatus.status")
def any_gateway_serves_any_uuid(s: Server) -> None:
    live = s.start(PROMPT, new=50)
    for address in s.addresses:
        live.at = address
        assert live.length() >= 0 and live.status() in (pb.Init, pb.Generating, FINISHED)
    live.at = ""
    assert live.take_all() == s.generate(PROMPT, new=50)


@case("1.4.9, 9 #13", "StartRequestResponse.as_status", "StartRequestResponse.uuid")
def a_refusal_names_what_is_wrong(s: Server) -> None:
    answer, trailing = s.ask("StartRequest", request(s.main, PROMPT, top_k=-1))
    assert (answer.as_status, "top_k" in trailing["allspark-reason"]) == (PARAM, True)


@case("9 #16", S + "span_size", S + "prefix_cache_hit_rate")
def span_size_is_in_bytes_whatever_its_number_of_tokens(s: Server) -> None:
    sizes = {}
    for tokens in (16, 64):
        with s.model(cache_span_size=tokens) as name:
            sizes[tokens] = s.stat(name).span_size
    assert sizes[64] == 4 * sizes[16]
