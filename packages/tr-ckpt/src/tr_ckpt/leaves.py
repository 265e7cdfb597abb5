"""Turn the values at the ends of a state, other than tensors, into JSON and back.

Each kind has a tag: `{"$bytes": "aGk="}`. Decoding one builds a value of that kind and runs nothing else.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from tr_ckpt.errors import CheckpointError

# Beyond this, other JSON readers round, and Python refuses numbers of more than 4300 digits.
_PLAIN_INT = 2**63

# Booleans, integers, floats, complex numbers, times and text; never objects, which only pickle can hold.
_NUMPY_KINDS = "biufcmMSU"


def encode(value: Any) -> Any:
    """Return `value` as JSON, or `NotImplemented` if it is no leaf that this file knows."""
    if (encoder := _ENCODERS.get(type(value))) is not None:
        return encoder(value)
    numpy = sys.modules.get("numpy")  # no object is NumPy's unless NumPy is there
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
        data = base64.b64encode(value.tobytes()).decode()
        return {"$numpy": {"dtype": value.dtype.str, "data": data}}
    return NotImplemented


def array_bytes(value: Any) -> torch.Tensor | None:
    """Return the bytes of a NumPy array as a tensor, None for anything else and for arrays of objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.kind not in _NUMPY_KINDS:
        return None
    return torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0).byte()


def array_from_bytes(data: torch.Tensor, dtype: str, shape: list[int]) -> Any:
    """Return the NumPy array that `array_bytes` was given."""
    _, kind = _numpy_dtype(dtype)
    return data.numpy().view(kind).reshape(shape).copy()


def is_tag(name: str) -> bool:
    """Whether this file decodes `{name: ...}`."""
    return name in _DECODERS


def decode(tag: str, content: Any) -> Any:
    """Return the value that `encode` turned into `{tag: content}`.

    Raises:
        CheckpointError: the content does not fit the tag.
    """
    try:
        return _DECODERS[tag](content)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a constructor objects to, the file is what is wrong
        raise CheckpointError(f"{{{tag!r}: {content!r:.80}}} cannot be read: {error}") from error


def _encode_int(value: int) -> Any:
    return value if -_PLAIN_INT <= value < _PLAIN_INT else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _decode_float(content: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]


def _decode_dtype(content: str) -> torch.dtype:
    dtype = vars(torch).get(content)  # not getattr, which imports what it does not find
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {content!r}; a newer one wrote it")
    return dtype


def _numpy_dtype(dtype: str) -> tuple[Any, Any]:
    try:
        import numpy
    except ImportError:
        raise CheckpointError("it holds a NumPy value, and NumPy is not installed; pip install numpy") from None
    kind = numpy.dtype(dtype)
    if kind.kind not in _NUMPY_KINDS:
        raise CheckpointError(f"a NumPy value of dtype {dtype!r} is not read: it could hold objects")
    return numpy, kind


def _decode_numpy(content: dict[str, str]) -> Any:
    numpy, kind = _numpy_dtype(content["dtype"])
    return numpy.frombuffer(base64.b64decode(content["data"], validate=True), dtype=kind)[0]


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    torch.Size: lambda value: {"$size": list(value)},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
}

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$float": _decode_float,
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$size": torch.Size,
    "$dtype": _decode_dtype,
    "$device": torch.device,
    "$numpy": _decode_numpy,
}
