"""Tensor layouts against SciPy-free references: dense, CSC, ELL, every numeric type."""

import numpy as np
import pytest
from allspark_bus import tensors
from allspark_bus.errors import ParamError
from allspark_proto import allspark_service_pb2 as pb

RNG = np.random.default_rng(7)


def tensor(data: bytes, dtype: int, dims: tuple[int, ...], mode: int = pb.DENSE) -> pb.Tensor:
    return pb.Tensor(data=data, data_type=dtype, data_mode=mode, shape=pb.Tensor.Shape(dims=dims))


@pytest.mark.parametrize(
    ("dtype", "np_dtype"),
    [
        (1, "<f4"),
        (2, "<f2"),
        (3, "i1"),
        (4, "<i2"),
        (5, "<i4"),
        (6, "<i8"),
        (8, "u1"),
        (9, "<u2"),
        (10, "u1"),
    ],
)
def test_dense(dtype: int, np_dtype: str) -> None:
    array = RNG.integers(0, 100, (3, 4)).astype(np_dtype)
    got = tensors.to_array("x", tensor(array.tobytes(), dtype, (3, 4)))
    np.testing.assert_array_equal(got, array)


def csc(dense: np.ndarray) -> bytes:
    offsets, index, values = [0], [], []
    for column in dense.T:
        rows = np.flatnonzero(column)
        index += rows.tolist()
        values += column[rows].tolist()
        offsets.append(len(index))
    return (
        np.asarray(offsets, "<i4").tobytes()
        + np.asarray(index, "<i4").tobytes()
        + np.asarray(values, dense.dtype).tobytes()
    )


def ell(dense: np.ndarray) -> bytes:
    width = max((int((c != 0).sum()) for c in dense.T), default=0)
    index, values = [], []
    for column in dense.T:
        rows = np.flatnonzero(column).tolist()
        pad = width - len(rows)
        index += rows + [0] * pad
        values += column[rows].tolist() + [0] * pad
    return np.asarray(index, "<u2").tobytes() + np.asarray(values, dense.dtype).tobytes()


@pytest.mark.parametrize("seed", range(8))
def test_csc_and_ell_expand_to_the_dense_matrix(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 9, 2)
    dense = (rng.integers(1, 9, (rows, columns)) * (rng.random((rows, columns)) < 0.4)).astype("<i8")
    for pack, mode in ((csc, pb.CSC), (ell, pb.ELL)):
        got = tensors.to_array("x", tensor(pack(dense), pb.INT64, (rows, columns), mode))
        np.testing.assert_array_equal(got, dense)


@pytest.mark.parametrize(
    ("data", "dims", "mode"),
    [
        (b"", (2, 2), pb.CSC),
        (np.asarray([0, 1, 5], "<i4").tobytes() + b"\0" * 12, (2, 2), pb.CSC),
        (np.asarray([0, 2, 1, 9], "<i4").tobytes() + b"\0" * 8, (2, 2), pb.CSC),
        (np.asarray([7], "<u2").tobytes() + b"\0" * 8, (2, 1), pb.ELL),
        (b"\0" * 11, (2, 1), pb.ELL),
        (b"\0" * 10, (2, 0), pb.ELL),
        (b"\0" * 10, (2, 2, 2), pb.ELL),
        (b"\0" * 32, (2, 2), 9),
    ],
)
def test_malformed_sparse_tensors_are_refused(data: bytes, dims: tuple[int, ...], mode: int) -> None:
    with pytest.raises(ParamError):
        tensors.to_array("x", tensor(data, pb.INT64, dims, mode))
