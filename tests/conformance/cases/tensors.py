"""Section 2.3: Tensor, TensorMap, TensorListMap, and the inputs of a Generate request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from allspark.text import load_tokenizer
from allspark_proto import allspark_service_pb2 as pb
from google.protobuf.descriptor import Descriptor

from tests.conformance.server import LIMIT, OK, PARAM, Server, request, tensor, text_tensor
from tests.conformance.suite import add, case

PROMPT = [5, 6, 7]
T = "Tensor."
#: data_type -> bytes of one item (2.3.2); STRING is apart.
SIZES = {
    pb.FLOAT32: 4,
    pb.FLOAT16: 2,
    pb.INT8: 1,
    pb.INT16: 2,
    pb.INT32: 4,
    pb.INT64: 8,
    pb.BOOL: 1,
    pb.BFLOAT16: 2,
    pb.UINT8: 1,
}


def with_ids(s: Server, ids: pb.Tensor) -> pb.StartRequestRequest:
    """A request whose input_ids is this tensor."""
    message = request(s.main, PROMPT, max_length=11)
    message.inputs.tensor_map["input_ids"].CopyFrom(ids)
    return message


def _extra(data_type: int, count: int, num_bytes: int) -> pb.Tensor:
    extra = pb.Tensor(data_type=data_type, data=bytes(num_bytes))
    extra.shape.dims[:] = [1, count]
    return extra


def _type_row(data_type: int, size: int) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        def status(num_bytes: int) -> int:
            return s.refused(request(s.main, PROMPT, tensors={"extra": _extra(data_type, 3, num_bytes)}))

        assert [status(3 * size), status(3 * size - 1), status(3 * size + 1)] == [OK, PARAM, PARAM]

    return run


for _type, _size in SIZES.items():
    add("2.3.2", f"{pb.DATA_TYPE.Name(_type)} has {_size} bytes an item", (T + "data_type", T + "data"),
        _type_row(_type, _size))  # fmt: skip


def _ids_row(
    status: int, ids: list[int], shape: list[int], changes: dict[str, Any]
) -> Callable[[Server], None]:
    def run(s: Server) -> None:
        data_type = changes.get("data_type", pb.INT64)
        made = tensor(ids, data_type if data_type in (pb.INT32, pb.FLOAT32) else pb.INT64)
        made.data_type = data_type
        made.shape.dims[:] = shape
        made.device_type.dev_type = changes.get("dev_type", pb.CPU)
        made.name = changes.get("name", "tensor")
        made.data_mode = changes.get("data_mode", pb.DENSE)
        if status == OK:
            assert s.submit(with_ids(s, made)).take_all() == s.generate(PROMPT)
        else:
            assert s.refused(with_ids(s, made)) == status

    return run


WIDE = 2**31 - 1
IDS_ROWS: tuple[tuple[str, str, int, list[int], Any, dict[str, Any], tuple[str, ...]], ...] = (
    ("2.3.4, 9 #14", "input_ids [1, S] INT64", OK, PROMPT, [1, 3], {}, ("Shape.dims", "data_type")),
    ("2.3.4", "input_ids [S]", OK, PROMPT, [3], {}, ("Shape.dims",)),
    ("2.3.4", "input_ids INT32 is widened", OK, PROMPT, [1, 3], {"data_type": pb.INT32}, ("data_type",)),
    ("2.3.4", "input_ids of rank three", PARAM, PROMPT, [1, 1, 3], {}, ("Shape.dims",)),
    ("2.3.4", "input_ids of rank zero", PARAM, [5], [], {}, ("Shape.dims",)),
    ("2.3.4", "two rows", LIMIT, [5, 6, 7, 8], [2, 2], {}, ("Shape.dims",)),
    ("2.3.4", "no row", LIMIT, [], [0, 3], {}, ("Shape.dims",)),
    ("2.3.4", "an id below zero", PARAM, [5, -1, 7], [1, 3], {}, ("data",)),
    ("2.3.4", "an id of the size of the vocabulary", PARAM, [5, 1 << 40, 7], [1, 3], {}, ("data",)),
    ("2.3.4", "input_ids as FLOAT32", PARAM, PROMPT, [1, 3], {"data_type": pb.FLOAT32}, ("data_type",)),
    ("2.3.1", "a negative dimension", PARAM, PROMPT, [1, -3], {}, ("Shape.dims", "shape")),
    ("2.3.1", "two negative dimensions", PARAM, PROMPT, [-1, -3], {}, ("Shape.dims",)),
    ("2.3.1", "dimensions whose product overflows", PARAM, PROMPT, [WIDE, WIDE], {}, ("Shape.dims",)),
    ("2.3.1", "a product that wraps to the right size", PARAM, PROMPT, [1 << 16, 1 << 16, 3], {}, ("shape",)),
    ("2.3.1", "fewer bytes than the shape", PARAM, PROMPT, [1, 4], {}, ("data",)),
    ("2.3.1", "more bytes than the shape", PARAM, PROMPT, [1, 2], {}, ("data",)),
    ("2.3.1", "name is ignored", OK, PROMPT, [1, 3], {"name": "anything"}, ("name",)),
    ("2.3.1", "device_type CUDA is ignored on input", OK, PROMPT, [1, 3], {"dev_type": pb.CUDA},
     ("device_type",)),
    ("2.3.2", "data_type undefined", PARAM, PROMPT, [1, 3], {"data_type": pb.DATATYPE_UNDEFINED},
     ("data_type",)),
    ("2.3.2", "data_type unknown", PARAM, PROMPT, [1, 3], {"data_type": 99}, ("data_type",)),
    ("2.3.3", "data_mode unknown", PARAM, PROMPT, [1, 3], {"data_mode": 9}, ("data_mode",)),
)  # fmt: skip
for _spec, _name, _status, _ids, _shape, _changes, _about in IDS_ROWS:
    _names = tuple("DeviceType.dev_type" if f == "dev_type" else T + f for f in _about)
    add(
        _spec,
        f"{_name} {_status}",
        (*_names, "TensorMap.tensor_map"),
        _ids_row(_status, _ids, _shape, _changes),
    )


def csc(values: Any) -> bytes:
    """Column offsets int32, row indices int32 column by column, values (2.3.3)."""
    rows, columns = np.nonzero(np.asarray(values).T)[::-1]
    offsets = np.searchsorted(columns, np.arange(np.shape(values)[1] + 1))
    data = np.asarray(values)[rows, columns]
    return offsets.astype("<i4").tobytes() + rows.astype("<i4").tobytes() + data.astype("<i8").tobytes()


@case("2.3.3", T + "data_mode", T + "data")
def input_ids_as_CSC_are_the_same_prompt(s: Server) -> None:
    ids = tensor([PROMPT])
    ids.data_mode, ids.data = pb.CSC, csc([PROMPT])
    assert s.submit(with_ids(s, ids)).take_all() == s.generate(PROMPT)


@case("2.3.3", T + "data_mode", T + "data")
def input_ids_as_ELL_are_the_same_prompt(s: Server) -> None:
    ids = tensor([PROMPT])
    ids.data_mode, ids.data = pb.ELL, np.zeros(3, "<u2").tobytes() + np.asarray(PROMPT, "<i8").tobytes()
    assert s.submit(with_ids(s, ids)).take_all() == s.generate(PROMPT)


@case("2.3.3", T + "data_mode", T + "data")
def malformed_sparse_tensors_2(s: Server) -> None:
    for mode, data in (
        (pb.CSC, csc([PROMPT])[:-1]),
        (pb.CSC, b""),
        (pb.CSC, csc([PROMPT]).replace((3).to_bytes(4, "little"), (9).to_bytes(4, "little"), 1)),
        (pb.ELL, bytes(29)),
        (pb.ELL, np.full(3, 7, "<u2").tobytes() + np.asarray(PROMPT, "<i8").tobytes()),
    ):
        ids = tensor([PROMPT])
        ids.data_mode, ids.data = mode, data
        assert s.refused(with_ids(s, ids)) == PARAM
    flat = tensor(PROMPT)
    flat.data_mode, flat.data = pb.CSC, csc([PROMPT])
    assert s.refused(with_ids(s, flat)) == PARAM, "sparse layouts have two dimensions"


@case("D", T + "data_type", T + "data", "Tensor.Shape.dims")
def a_STRING_tensor_is_one_UTF8_string(s: Server) -> None:
    def status(made: pb.Tensor) -> int:
        return s.refused(request(s.main, PROMPT, tensors={"note": made}))

    good, not_utf8, two = text_tensor("\u00e4\u4e2d"), text_tensor("x"), text_tensor("x")
    not_utf8.data = b"\xff\xfe"
    two.shape.dims[:] = [2]
    assert [status(good), status(not_utf8), status(two)] == [OK, PARAM, PARAM]


@case("text", "TensorMap.tensor_map", "GeneratedElements.tensors_from_model_inference", T + "data")
def a_prompt_as_text_is_the_prompt_of_its_tokens_and_text_comes_back(s: Server) -> None:
    """An extension of this project: a STRING tensor `text` instead of input_ids."""
    tokenizer = load_tokenizer(Path(s.reference_path))
    message = request(s.main, PROMPT, max_length=60)
    message.inputs.Clear()
    message.inputs.tensor_map["text"].CopyFrom(text_tensor("a prompt"))
    live = s.submit(message)
    tokens, text = [], ""
    while (element := live.get()).ids_from_generate:
        tokens += element.ids_from_generate
        piece = element.tensors_from_model_inference.tensor_map["text"]
        assert (piece.data_type, list(piece.shape.dims)) == (pb.STRING, [1])
        text += piece.data.decode()
    assert live.release() == OK
    prompt = tokenizer.encode("a prompt")
    assert tokens == s.generate(prompt, max_length=60)
    assert text == tokenizer.decode(tokens)


@case("2.3.4", "TensorMap.tensor_map")
def attention_mask_and_unknown_inputs_change_nothing(s: Server) -> None:
    expected = s.generate(PROMPT)
    for name in ("attention_mask", "hash_input", "something_else"):
        assert s.generate(PROMPT, tensors={name: tensor([[0, 0, 0]])}) == expected


@case("2.3.5, 9 #15", "GeneratedElements.tensors_from_model_inference")
def tensors_from_model_inference_is_present_and_empty(s: Server) -> None:
    live = s.start(PROMPT)
    for element in (live.get(), live.get_no_wait()):
        assert element.HasField("tensors_from_model_inference")
        assert not element.tensors_from_model_inference.tensor_map
    assert live.release() == OK


@case("2.3.1", T + "device_type", "DeviceType.dev_type", T + "data_mode", T + "shape")
def output_tensors_are_dense_and_on_the_CPU(s: Server) -> None:
    live = s.start(PROMPT, infer_type=pb.ModelInference)
    tensors = live.elements().tensors_from_model_inference.tensor_map
    assert tensors
    for made in tensors.values():
        assert (made.device_type.dev_type, made.data_mode) == (pb.CPU, pb.DENSE)
        assert len(made.data) == int(np.prod(made.shape.dims)) * SIZES[made.data_type]
    assert live.release() == OK


@case("2.3.6", "TensorListMap.tensor_list_map", "TensorListMap.Array.tensor")
def TensorListMap_travels_in_no_RPC(s: Server) -> None:
    reached: set[str] = set()

    def visit(message: Descriptor) -> None:
        if message.full_name not in reached:
            reached.add(message.full_name)
            for field in message.fields:
                if field.message_type is not None:
                    visit(field.message_type)

    for method in pb.DESCRIPTOR.services_by_name["AllSpark"].methods:
        visit(method.input_type)
        visit(method.output_type)
    assert pb.TensorMap.DESCRIPTOR.full_name in reached
    assert pb.TensorListMap.DESCRIPTOR.full_name not in reached
    made = pb.TensorListMap()
    made.tensor_list_map["a"].tensor.add(name="b")
    assert pb.TensorListMap.FromString(made.SerializeToString()) == made
