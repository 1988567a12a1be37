"""AllSpark tensors as NumPy arrays: contiguous, row-major, little-endian (spec 2.3)."""

import math

import numpy as np
from allspark_proto import allspark_service_pb2 as pb
from numpy.typing import NDArray

from allspark_bus.errors import LimitError, ParamError

#: What NumPy 1 and 2 both take.
_MAX_DIMS = 32
#: Of a sparse layout, where the caller knows no tighter bound.
MAX_EXPANDED_VALUES = 1 << 25
_DTYPES: dict[int, np.dtype[np.generic]] = {
    pb.FLOAT32: np.dtype("<f4"),
    pb.FLOAT16: np.dtype("<f2"),
    pb.INT8: np.dtype("i1"),
    pb.INT16: np.dtype("<i2"),
    pb.INT32: np.dtype("<i4"),
    pb.INT64: np.dtype("<i8"),
    pb.BOOL: np.dtype("u1"),
    pb.BFLOAT16: np.dtype("<u2"),  # the upper half of binary32; NumPy has no such type
    pb.UINT8: np.dtype("u1"),
}


def to_array(name: str, tensor: pb.Tensor, max_values: int = MAX_EXPANDED_VALUES) -> NDArray[np.generic]:
    """The values, shaped; bfloat16 as raw uint16, CSC and ELL expanded to dense.

    Raises ParamError when type, shape and bytes do not agree, LimitError for a sparse layout that stands for
    more than `max_values`: a few bytes may stand for any number.
    """
    dtype = _DTYPES.get(tensor.data_type)
    if dtype is None:
        raise ParamError(f"tensor {name!r}: data_type {tensor.data_type} has no numeric values")
    dims = list(tensor.shape.dims)
    if any(d < 0 for d in dims):
        raise ParamError(f"tensor {name!r}: negative dimension in shape {dims[:_MAX_DIMS]}")
    if len(dims) > _MAX_DIMS:
        raise ParamError(f"tensor {name!r} has {len(dims)} dimensions, the limit is {_MAX_DIMS}")
    if tensor.data_mode == pb.DENSE:
        return _dense(name, tensor.data, dtype, dims)
    if len(dims) != 2:
        raise ParamError(f"tensor {name!r}: sparse layouts are for two dimensions, shape is {dims}")
    # An empty matrix may have one long side, too.
    if max(1, dims[0]) * max(1, dims[1]) > max_values:
        raise LimitError(
            f"tensor {name!r}: shape {dims} is too large to expand, the limit is {max_values} values"
        )
    if tensor.data_mode == pb.CSC:
        return _from_csc(name, tensor.data, dtype, dims[0], dims[1])
    if tensor.data_mode == pb.ELL:
        return _from_ell(name, tensor.data, dtype, dims[0], dims[1])
    raise ParamError(f"tensor {name!r}: data_mode {tensor.data_mode} is unknown")


def check(name: str, tensor: pb.Tensor, max_values: int = MAX_EXPANDED_VALUES) -> None:
    """Raises as `to_array`; a STRING is UTF-8, dims [1]."""
    if tensor.data_type != pb.STRING:
        to_array(name, tensor, max_values)
        return
    if list(tensor.shape.dims) != [1]:
        raise ParamError(f"tensor {name!r}: a STRING tensor holds one string, so its shape is [1]")
    try:
        tensor.data.decode()
    except UnicodeDecodeError as e:
        raise ParamError(f"tensor {name!r}: not UTF-8 ({e.reason} at byte {e.start})") from e


def _dense(name: str, data: bytes, dtype: np.dtype[np.generic], dims: list[int]) -> NDArray[np.generic]:
    expected = math.prod(dims) * dtype.itemsize
    if len(data) != expected:
        raise ParamError(f"tensor {name!r}: shape {dims} needs {expected} bytes, data has {len(data)}")
    if math.prod(max(1, d) for d in dims) * dtype.itemsize >= 1 << 63:
        raise ParamError(f"tensor {name!r}: shape {dims} is too large for any memory")
    return np.frombuffer(data, dtype).reshape(dims)


def _from_csc(
    name: str, data: bytes, dtype: np.dtype[np.generic], rows: int, columns: int
) -> NDArray[np.generic]:
    """(columns + 1) int32 offsets, then int32 row indices column by column, then the values."""
    head = 4 * (columns + 1)
    if len(data) < head or (len(data) - head) % (4 + dtype.itemsize):
        raise ParamError(f"tensor {name!r}: {len(data)} bytes are no CSC matrix of {columns} columns")
    nnz = (len(data) - head) // (4 + dtype.itemsize)
    offsets = np.frombuffer(data, "<i4", columns + 1)
    index = np.frombuffer(data, "<i4", nnz, head)
    values = np.frombuffer(data, dtype, nnz, head + 4 * nnz)
    wide = offsets.astype(np.int64)  # in 32 bits, a fall of more than 2^31 would look like a rise
    counts = wide[1:] - wide[:-1]
    if offsets[0] != 0 or offsets[-1] != nnz or (counts < 0).any():
        raise ParamError(f"tensor {name!r}: CSC column offsets must rise from 0 to {nnz}")
    _check_rows(name, index, rows)
    dense = np.zeros((rows, columns), dtype)
    dense[index, np.repeat(np.arange(columns), counts)] = values
    return dense


def _from_ell(
    name: str, data: bytes, dtype: np.dtype[np.generic], rows: int, columns: int
) -> NDArray[np.generic]:
    """Every column has the same count of entries: uint16 row indices, then the values."""
    size = 2 + dtype.itemsize
    if len(data) % size or (columns and (len(data) // size) % columns) or (data and not columns):
        raise ParamError(f"tensor {name!r}: {len(data)} bytes are no ELL matrix of {columns} columns")
    nnz = len(data) // size
    index = np.frombuffer(data, "<u2", nnz)
    values = np.frombuffer(data, dtype, nnz, 2 * nnz)
    _check_rows(name, index, rows)
    dense = np.zeros((rows, columns), dtype)
    if not nnz:
        return dense
    # Padding repeats a row with value zero, so entries of one place are added up.
    np.add.at(dense, (index, np.repeat(np.arange(columns), nnz // columns)), values)
    return dense


def _check_rows(name: str, index: NDArray[np.generic], rows: int) -> None:
    if index.size and (int(index.min()) < 0 or int(index.max()) >= rows):
        raise ParamError(f"tensor {name!r}: a row index is outside [0, {rows})")


def from_array(name: str, array: NDArray[np.int64] | NDArray[np.float32]) -> pb.Tensor:
    """The tensor of an int64 or float32 array; raises ValueError for another type."""
    types = {np.dtype(np.int64): pb.INT64, np.dtype(np.float32): pb.FLOAT32}
    if array.dtype not in types:
        raise ValueError(f"tensor {name!r}: {array.dtype} is neither int64 nor float32")
    return pb.Tensor(
        name=name,
        shape=pb.Tensor.Shape(dims=array.shape),
        device_type=pb.DeviceType(dev_type=pb.CPU),
        data_type=types[array.dtype],
        data=array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(),
    )


def from_string(name: str, text: str) -> pb.Tensor:
    """The STRING tensor of one text."""
    return pb.Tensor(
        name=name,
        shape=pb.Tensor.Shape(dims=[1]),
        device_type=pb.DeviceType(dev_type=pb.CPU),
        data_type=pb.STRING,
        data=text.encode(),
    )


def prompt_ids(request: pb.StartRequestRequest, max_values: int = MAX_EXPANDED_VALUES) -> NDArray[np.int64]:
    """The prompt [S] of a Generate request: tensor `input_ids`, [1, S] or [S], INT64 or INT32.

    Raises ParamError (missing, wrong type or shape) or LimitError (more than one row).
    """
    if "input_ids" not in request.inputs.tensor_map:
        raise ParamError("inputs has no tensor 'input_ids'")
    tensor = request.inputs.tensor_map["input_ids"]
    if tensor.data_type not in (pb.INT64, pb.INT32):
        name = pb.DATA_TYPE.Name(tensor.data_type) if tensor.data_type in pb.DATA_TYPE.values() else "unknown"
        raise ParamError(f"tensor 'input_ids' must be INT64 or INT32, not {name} ({tensor.data_type})")
    ids = to_array("input_ids", tensor, max_values)
    if ids.ndim not in (1, 2):
        raise ParamError(f"tensor 'input_ids' must have shape [1, S] or [S], not {list(ids.shape)}")
    if ids.ndim == 2 and ids.shape[0] > 1:
        raise LimitError(f"tensor 'input_ids' has {ids.shape[0]} rows: one request is one prompt")
    return ids.reshape(-1).astype(np.int64)
