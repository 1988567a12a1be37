"""Protobuf messages with any values in any fields."""

from __future__ import annotations

import struct
from typing import Any

from allspark_proto import allspark_service_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from hypothesis import strategies as st

TEXTS = [
    "",
    "type",
    "json_schema",
    "regex",
    "{}",
    "[",
    "[" * 5000,
    "1" * 5000,
    "é",
    "\0",
    "CPU:0",
    "CUDA:0,0",
]
TEXTS += ["CUDA:0,1", "CPU:" + "9" * 5000, "CPU:\u0663", "a2w8", "input_ids", "7", "9999999999", "x" * 3000]
_RANGES = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def scalar(draw: st.DrawFn, field: Any) -> Any:
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return draw(st.integers(0, 5) | st.sampled_from([-1, 16, 128, low, high]).filter(lambda v: v >= low))
    if field.cpp_type in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return draw(st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.5, float("inf"), float("-inf"), float("nan")]))
    if field.cpp_type == Field.CPPTYPE_BOOL:
        return draw(st.booleans())
    if field.cpp_type == Field.CPPTYPE_ENUM:
        return draw(st.integers(-1, 9) | st.just(2**31 - 1))
    if field.type == Field.TYPE_BYTES:
        return draw(st.binary(max_size=40))
    return draw(st.sampled_from(TEXTS))


def is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def fill(draw: st.DrawFn, message: Message, share: int) -> None:
    """About one in `share` of the fields gets a value; maps and lists a few."""
    for field in message.DESCRIPTOR.fields:
        if draw(st.integers(1, share)) > 1:
            continue
        if is_map(field):
            key, value = field.message_type.fields
            for _ in range(draw(st.integers(0, 2))):
                name = scalar(draw, key)
                if value.message_type is not None:
                    fill(draw, getattr(message, field.name)[name], 2)
                else:
                    getattr(message, field.name)[name] = scalar(draw, value)
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                if field.message_type is not None:
                    fill(draw, getattr(message, field.name).add(), 2)
                else:
                    getattr(message, field.name).append(scalar(draw, field))
        elif field.message_type is not None:
            fill(draw, getattr(message, field.name), share)
        else:
            setattr(message, field.name, scalar(draw, field))


def tensor(dims: list[int], data: bytes, data_type: int = pb.INT64, mode: int = pb.DENSE) -> pb.Tensor:
    made = pb.Tensor(data=data)
    made.data_type, made.data_mode = data_type, mode
    made.shape.dims[:] = dims
    return made


def request() -> pb.StartRequestRequest:
    made = pb.StartRequestRequest(model_name="m")
    made.config.uuid = "u"
    made.inputs.tensor_map["input_ids"].CopyFrom(tensor([1, 3], struct.pack("<3q", 7, 7, 2)))
    return made
