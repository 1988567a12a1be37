"""Which embeddings go where: every type, several placeholders, runs in order."""

import numpy as np
import pytest
from allspark_bus.rich_text import embedding_runs
from allspark_proto import allspark_service_pb2 as pb

RNG = np.random.default_rng(11)


def request(**arrays: np.ndarray) -> pb.StartRequestRequest:
    r = pb.StartRequestRequest(mm_type=pb.MultiMediaTypeRichText)
    for name, array in arrays.items():
        tensor = r.inputs.tensor_map[name.removeprefix("t")]
        tensor.data_type = {"f4": pb.FLOAT32, "f2": pb.FLOAT16, "u2": pb.BFLOAT16}[array.dtype.str[1:]]
        tensor.shape.dims[:] = array.shape
        tensor.data = array.tobytes()
    return r


def test_runs_of_several_placeholders_come_in_the_order_of_the_prompt() -> None:
    prompt = np.array([7, 7, 1, 8, 8, 8, 7, 7, 2, 8, 8, 8, 0], np.int64)
    sevens, eights = RNG.normal(size=(2, 2, 4)).astype("<f4"), RNG.normal(size=(2, 3, 4)).astype("<f4")
    zero = RNG.normal(size=(1, 4)).astype("<f4")
    runs = embedding_runs(request(t7=sevens, t8=eights, t0=zero, t007=sevens, tx=sevens), prompt)
    assert [run.start for run in runs] == [0, 3, 6, 9, 12]
    for run, want in zip(runs, (sevens[0], eights[0], sevens[1], eights[1], zero), strict=True):
        np.testing.assert_array_equal(run.values, want)
        assert run.values.dtype == np.float32
    plain = request(t7=sevens)
    plain.mm_type = pb.TextInput
    assert embedding_runs(plain, prompt) == []


@pytest.mark.parametrize("dtype", ["<f2", "<u2"])
def test_half_precision_is_widened_exactly(dtype: str) -> None:
    values = np.array([[0.5, -1.25, 3.0, -0.0]], np.float32)
    bits = values.astype(dtype) if dtype == "<f2" else (values.view("<u4") >> 16).astype(dtype)
    (run,) = embedding_runs(request(t5=bits), np.array([5], np.int64))
    np.testing.assert_array_equal(run.values, values)
