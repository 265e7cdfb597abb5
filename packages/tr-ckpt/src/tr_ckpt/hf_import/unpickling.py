"""Unpickle plain state without executing anything that the pickle names.

A pickle is a program: it names functions and calls them. Here each allowed name stands for an object of this file,
which stores its arguments and does nothing. Any other name is refused before anything is called. Tensors become
descriptions, which `state_files.py` turns into tensors. NumPy's arrays and scalars become tensors and numbers. The
unpicklers of Python, torch and NumPy are not used, so the result does not depend on their versions.

A pickle writes a value once and may refer to it from many places, also from values that are themselves shared. A few
hundred bytes may therefore expand to more values than memory can hold, if the state is walked naively. `Finishing`
visits each value once, keeps shared values shared, and computes the expanded size without expanding.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tr_ckpt import untrusted
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.hf_import.pickle_machine import Machine

# Deeper than any state of an optimizer, schedule or generator.
MOST_DEPTH = 100

# The limit for a state with all shared values expanded, and for its tensors, each counted in full: this much in any
# case, or this many times the bytes that hold it.
MOST_VALUES = 1_000_000
MOST_BYTES = 64_000_000
TIMES_THE_FILE = 16

_LEAVES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, torch.Tensor)

# Number of values, and of bytes of text, that a value expands to, members included.
_Weight = tuple[int, int]


class Finishing:
    """One traversal of a state; it is changed in place if possible.

    Args:
        size_bytes: size of the file or pickle that holds it.
        replace: converts values that are not containers: a description to a tensor.
    """

    def __init__(self, size_bytes: int, replace: Callable[[Any], Any]) -> None:
        self._limits = max(MOST_VALUES, TIMES_THE_FILE * size_bytes), max(MOST_BYTES, TIMES_THE_FILE * size_bytes)
        self._size_bytes = size_bytes
        self._replace = replace
        self._done: dict[int, tuple[Any, Any, _Weight]] = {}  # keeps the value itself, so that its id is not reused
        self._open: set[int] = set()

    def finish(self, value: Any) -> Any:
        """Return the state.

        Raises:
            CheckpointError: it contains itself, is nested too deeply, expands to too much, or holds a value that is
                no state.
        """
        done, (values, size) = self._visit(value, 0)
        if values > self._limits[0] or size > self._limits[1]:
            raise CheckpointError(
                f"it stands for {_count(values)} values with {_count(size)} bytes of text, and what "
                f"{self._size_bytes:,} bytes hold may stand for {self._limits[0]:,} and {self._limits[1]:,}: the same "
                "ones are in it again and again"
            )
        return done

    def _visit(self, value: Any, depth: int) -> tuple[Any, _Weight]:
        if type(value) in (str, bytes):
            return value, (1, len(value))
        if type(value) in (int, float, bool, type(None)):
            return value, (1, value.bit_length() // 8 if type(value) is int else 0)
        if (known := self._done.get(id(value))) is not None:
            return known[1], known[2]
        if id(value) in self._open:
            raise CheckpointError("it contains itself; a state must be a tree")
        if depth > MOST_DEPTH:
            raise CheckpointError(f"it is nested more than {MOST_DEPTH} deep")
        self._open.add(id(value))
        done, weight = self._members(value, depth + 1)
        self._open.discard(id(value))
        self._done[id(value)] = value, done, weight
        return done, weight

    def _members(self, value: Any, depth: int) -> tuple[Any, _Weight]:
        if type(value) in (list, tuple):
            visited = [self._visit(item, depth) for item in value]
            items = [done for done, _ in visited]
            if type(value) is list:
                value[:] = items
            return value if type(value) is list else tuple(items), _sum(weight for _, weight in visited)
        if isinstance(value, dict):
            weights = []
            for key in value:
                value[key], weight = self._visit(value[key], depth)
                weights += [weight, self._visit(key, depth)[1]]
            metadata = vars(value).get("_metadata") if isinstance(value, OrderedDict) else None
            if metadata is not None:
                value._metadata, weight = self._visit(metadata, depth)  # pyright: ignore[reportAttributeAccessIssue]
                weights.append(weight)
            return value, _sum(weights)
        if type(value) in (set, frozenset):
            return value, _sum(self._visit(key, depth)[1] for key in value)
        done = self._replace(value)
        if not isinstance(done, _LEAVES):
            raise CheckpointError(f"it holds a {type(done).__name__} where a value must be")
        return done, (1, 0)


def _sum(weights: Any) -> _Weight:
    values, size = 1, 0
    for more, bytes_more in weights:
        values, size = values + more, size + bytes_more
    return values, size


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**15 else "more than 10^15"


# The limit for dimensions of a tensor, as in NumPy; torch writes fewer.
_MOST_DIMENSIONS = 64

_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
} | {"torch.storage.UntypedStorage": torch.uint8, "torch.UntypedStorage": torch.uint8}


@dataclass(frozen=True, slots=True)
class Storage:
    """The location of a tensor's numbers: a record of the archive, and the dtype of its bytes."""

    key: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor: a view of a storage, in numbers of its dtype."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_NUMBERS = {
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u8": torch.uint64,
    "u4": torch.uint32,
    "u2": torch.uint16,
    "u1": torch.uint8,
    "b1": torch.bool,
}


class _DType:
    """A dtype of NumPy: `number` is torch's."""

    def __init__(self, code: Any) -> None:
        if code not in _NUMBERS:
            raise CheckpointError(f"it holds a NumPy value of dtype {code!r:.80}; numbers and booleans are read")
        self.number = _NUMBERS[code]

    def take(self, state: Any) -> None:
        if state[1] == ">":
            raise CheckpointError("it holds NumPy values with the high byte first, which are not read")

    def tensor(self, data: Any) -> torch.Tensor:
        if not isinstance(data, bytes):
            raise DamagedCheckpointError(f"a NumPy value holds {type(data).__name__} in place of bytes")
        return torch.frombuffer(bytearray(data), dtype=self.number) if data else torch.empty(0, dtype=self.number)


class _Array:
    """A NumPy array: `values` is a tensor of its numbers."""

    values = torch.empty(0)

    def take(self, state: Any) -> None:
        """Load the state that NumPy writes of an array: version, shape, dtype, whether in Fortran's order, bytes."""
        _, shape, dtype, in_fortran_order, data = state
        if in_fortran_order and len(shape) > 1:
            raise CheckpointError("it holds a NumPy array in Fortran's order, which is not read")
        if len(shape) > _MOST_DIMENSIONS:
            raise DamagedCheckpointError(f"it holds a NumPy array of {len(shape):,} dimensions")
        self.values = dtype.tensor(data).reshape(shape)


def _scalar(dtype: _DType, data: Any) -> Any:
    return dtype.tensor(data).item()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise DamagedCheckpointError("bytes are given in a form that pickle does not write")
    return text.encode("latin1")


def _keyed(kind: type, given: Any = ()) -> Any:
    pairs = list(given.items()) if isinstance(given, dict) else [(key, value) for key, value in given]
    keys = [key for key, _ in pairs]
    if not all(type(key) in (str, int, float, bool, type(None)) for key in keys):
        raise CheckpointError("it has a key that is neither text, number, boolean nor None")
    untrusted.check_keys(keys)
    return kind(pairs if kind is OrderedDict else dict(pairs))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Strided:
    return _strided(storage, offset, size, stride, storage.dtype)


def _tensor_with_dtype(  # noqa: PLR0917  the order in which torch writes them
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> Strided:
    return _strided(storage, offset, size, stride, dtype)


def _strided(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any) -> Strided:
    is_sound = isinstance(storage, Storage) and isinstance(dtype, torch.dtype) and len(size) == len(stride)
    is_sound = is_sound and len(size) <= _MOST_DIMENSIONS
    if not is_sound or not all(type(number) is int and 0 <= number < 2**63 for number in (offset, *size, *stride)):
        raise DamagedCheckpointError("a tensor is described in a form that torch does not write")
    return Strided(storage, offset, tuple(size), tuple(stride), dtype)


def _parameter(data: Any, *rest: Any) -> Any:
    return data


@dataclass(frozen=True, slots=True)
class _Callee:
    """A callable that a pickle may name."""

    function: Callable[..., Any]


_NUMPY: dict[str, Any] = {
    "multiarray._reconstruct": lambda *given: _Array(),
    "multiarray.scalar": _scalar,
}

_CALLED: dict[str, Any] = {
    "collections.OrderedDict": lambda *given: _keyed(OrderedDict, *given),
    "collections.Counter": lambda *given: _keyed(Counter, *given),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": lambda size=(): torch.Size(size),
    "torch.device": lambda kind, index=None: torch.device(kind) if index is None else torch.device(kind, index),
    "_codecs.encode": _encode,
    "numpy.ndarray": lambda *given: _Array(),
    "numpy.dtype": lambda code, *rest: _DType(code),
    **{f"numpy.{core}.{name}": stand_in for core in ("core", "_core") for name, stand_in in _NUMPY.items()},
}

# Every name that a pickle may use, with the object that it gets.
_ALLOWED: dict[str, Any] = {
    **{name: _Callee(function) for name, function in _CALLED.items()},
    **_DTYPES,
    **_STORAGES,
}


class RefusedNameError(CheckpointError):
    """A pickle uses a name that is not allowed; the message is the name."""


class _Names:
    """The objects for the names in one pickle, and how much they have made of their arguments.

    Args:
        size_bytes: size of the pickle.
    """

    def __init__(self, size_bytes: int) -> None:
        self._left = TIMES_THE_FILE * size_bytes

    def find(self, path: str) -> Any:
        if path not in _ALLOWED:
            raise RefusedNameError(path)
        return _ALLOWED[path]

    def persistent(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
            raise DamagedCheckpointError("something other than a storage is kept outside the pickle")
        return Storage(str(pid[2]), pid[1])

    def call(self, callee: Any, given: tuple[Any, ...]) -> Any:
        if not isinstance(callee, _Callee):
            raise DamagedCheckpointError(f"it calls a {type(callee).__name__}")
        self._charge(given)
        return callee.function(*given)

    def build(self, made: Any, state: Any) -> None:
        if isinstance(made, _DType | _Array):
            self._charge(state)
            made.take(state)
        elif isinstance(made, OrderedDict) and isinstance(state, dict) and set(state) <= {"_metadata"}:
            vars(made).update(state)  # versions of a module's state
        elif not isinstance(made, Counter) or state:
            raise CheckpointError(f"it gives a {type(made).__name__} attributes, which are not read")

    def _charge(self, given: Any) -> None:
        # Arguments may be shared, and each call processes all of them.
        self._left -= sum(len(each) for each in given if isinstance(each, str | bytes | list | tuple | dict))
        if self._left < 0:
            raise CheckpointError("it makes much more of its values than it holds: the same ones again and again")


def load(data: bytes, tensor: Callable[[Strided], torch.Tensor]) -> Any:
    """Return the state in the pickle `data`; `tensor` converts a description to a tensor.

    Raises:
        RefusedNameError: it names anything but tensors, numbers and containers; nothing was executed.
        CheckpointError: it holds other unsupported content, or expands to much more than its size.
        DamagedCheckpointError: it is not a pickle, or is cut off.
    """

    def replaced(value: Any) -> Any:
        if isinstance(value, Strided):
            return tensor(value)
        return value.values if isinstance(value, _Array) else value

    names = _Names(len(data))
    machine = Machine(data, find=names.find, persistent=names.persistent, call=names.call, build=names.build)
    try:
        return Finishing(len(data), replaced).finish(machine.run())
    except CheckpointError:
        raise
    except Exception as error:  # any error of an instruction means that the bytes are wrong
        raise DamagedCheckpointError(f"{type(error).__name__}: {error}") from error
