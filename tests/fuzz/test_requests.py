"""Calls with any values in any fields: admission returns or raises the documented FleetError."""

from __future__ import annotations

import struct

import numpy as np
from allspark_broker import admission, build
from allspark_bus import tensors, text_inputs
from allspark_bus.errors import FleetError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.fuzzing import bounded_time, damaged_bytes, fuzz
from tests.fuzz.messages import fill, request, tensor

FACTS = fleet.ModelFacts(vocab_size=100, max_length=32, max_batch=6, kv_tokens=1000, hidden_size=4)
SIZES = [0, 1, 2, 3, 4, 5, 100, 2**28, 2**31 - 1, -1, -(2**31)]


def admit(given_request: pb.StartRequestRequest) -> None:
    """As brokers do."""
    with bounded_time():
        try:
            admission.check_uuid(given_request.config.uuid, 256)
            admission.check_adapter_name("lora_name", given_request.config.lora_name)
            text_inputs.text_prompt(given_request, FACTS.max_length)
            admission.check_request(given_request, FACTS)
        except FleetError as error:
            assert error.status != 0 and 0 < len(error.reason) < 30_000


@st.composite
def requests(draw: st.DrawFn) -> pb.StartRequestRequest:
    made = request()
    fill(draw, made, draw(st.sampled_from([2, 8, 20])))
    if draw(st.booleans()):
        made.inputs.tensor_map["input_ids"].CopyFrom(request().inputs.tensor_map["input_ids"])
    return made


@fuzz(400)
@given(made=requests())
def test_a_request_with_any_fields_is_admitted_or_refused(made: pb.StartRequestRequest) -> None:
    admit(made)


@fuzz(200)
@given(data=damaged_bytes(request().SerializeToString()))
def test_a_request_of_any_bytes_is_admitted_or_refused(data: bytes) -> None:
    try:
        made = pb.StartRequestRequest.FromString(data)
    except DecodeError:
        return
    admit(made)


@st.composite
def model_configs(draw: st.DrawFn) -> pb.ModelStructConfig:
    made = pb.ModelStructConfig(model_name="m", model_path="/m", compute_unit="CPU:0")
    fill(draw, made, draw(st.sampled_from([2, 6])))
    return made


@fuzz(300)
@given(config=model_configs())
@example(config=pb.ModelStructConfig(model_name="m", model_path="/m", compute_unit="CPU:" + "9" * 5000))
@example(config=pb.ModelStructConfig(model_name="m", model_path="/m", compute_unit="CUDA:\u0663"))
def test_a_model_with_any_fields_is_built_or_refused(config: pb.ModelStructConfig) -> None:
    with bounded_time():
        try:
            build.check_config(config)
        except FleetError as error:
            assert error.status != 0 and 0 < len(error.reason) < 30_000


LAYOUTS = [
    (pb.DENSE, [2, 2], struct.pack("<4f", 1, 2, 3, 4)),
    (pb.CSC, [2, 2], struct.pack("<3i2i2f", 0, 1, 2, 1, 0, 5, 6)),
    (pb.ELL, [2, 2], struct.pack("<2H2f", 1, 0, 5, 6)),
]


@st.composite
def any_tensors(draw: st.DrawFn) -> pb.Tensor:
    mode, dims, data = draw(st.sampled_from(LAYOUTS))
    if draw(st.booleans()):
        data = draw(damaged_bytes(data))
    if draw(st.booleans()):
        dims = draw(st.lists(st.sampled_from(SIZES), max_size=3))
    if draw(st.integers(0, 3)) == 0:
        data = b""
    return tensor(dims, data, draw(st.sampled_from([pb.FLOAT32, pb.FLOAT32, *range(12)])), mode)


@fuzz(800)
@given(made=any_tensors())
@example(made=tensor([1] * 100, bytes(8)))
@example(made=tensor([2**31 - 1, 0, 2**31 - 1, 2**31 - 1], b""))
@example(made=tensor([2**31 - 1, 0], bytes(4), pb.FLOAT32, pb.CSC))
@example(made=tensor([0, 2**31 - 1], b"", pb.FLOAT32, pb.ELL))
@example(made=tensor([1, 2**28], b"", pb.INT8, pb.ELL))
@example(made=tensor([1, 3], struct.pack("<4i", 0, 2**31 - 1, -(2**31), 0), pb.FLOAT32, pb.CSC))
def test_a_tensor_of_any_layout_is_read_or_refused(made: pb.Tensor) -> None:
    with bounded_time():
        try:
            array = tensors.to_array("t", made)
        except FleetError as error:
            assert error.status != 0 and 0 < len(error.reason) < 10_000
        else:
            assert array.shape == tuple(made.shape.dims)


def test_the_tensors_that_are_damaged_are_valid() -> None:
    wanted = ([[1, 2], [3, 4]], [[0, 6], [5, 0]], [[0, 6], [5, 0]])
    for (mode, dims, data), values in zip(LAYOUTS, wanted, strict=True):
        np.testing.assert_array_equal(tensors.to_array("t", tensor(dims, data, pb.FLOAT32, mode)), values)
    admission.check_request(request(), FACTS)
