"""Encode a nested state as JSON plus named tensors, and decode it again, without pickle.

JSON values are kept as they are. Anything else is an object with one name that begins with `$`:

| value | JSON |
|---|---|
| tensor | `{"$tensor": NAME}`; its numbers are under NAME in the safetensors file, once if it is shared |
| dict whose keys are not all plain strings | `{"$dict": [[KEY, VALUE], ...]}` |
| OrderedDict, such as a module's state | `{"$ordered": [[KEY, VALUE], ...], "$metadata": ...}` |
| Counter | `{"$counter": [[KEY, COUNT], ...]}` |
| tuple | `{"$tuple": [...]}` |
| NumPy array | `{"$array": {"tensor": NAME, "dtype": "<f8", "shape": [...]}}` |
| NumPy scalar, bytes, dtype, device, Size, NaN, infinities, integers beyond 64 bits | see `_LEAF_DECODERS` |

Decoding a tag builds a value of that kind and runs nothing else.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from tr_ckpt import tensor_file, untrusted
from tr_ckpt.errors import CheckpointError

# Other JSON readers round larger numbers, and Python refuses numbers of more than 4300 digits.
_PLAIN_INT = 2**63

# Booleans, integers, floats, complex numbers, times and text; never objects, which need pickle.
_NUMPY_KINDS = "biufcmMSU"


def encode_leaf(value: Any) -> Any:
    """Return `value` as JSON, or `NotImplemented` if this file does not know its type."""
    if (encoder := _LEAF_ENCODERS.get(type(value))) is not None:
        return encoder(value)
    numpy = sys.modules.get("numpy")  # without it no value can be NumPy's
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
        data = base64.b64encode(value.tobytes()).decode()
        return {"$numpy": {"dtype": value.dtype.str, "data": data}}
    if isinstance(value, str):  # a member of an enum of texts, say: it equals its text, which comes back
        return str.__str__(value)
    return NotImplemented


def array_bytes(value: Any) -> torch.Tensor | None:
    """Return the bytes of a NumPy array as a tensor, None for anything else and for arrays of objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.kind not in _NUMPY_KINDS:
        return None
    return torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0).byte()


def array_from_bytes(data: torch.Tensor, dtype: str, shape: list[int]) -> Any:
    """Return the NumPy array whose bytes `array_bytes` returned."""
    _, kind = _numpy_dtype(dtype)
    return data.numpy().view(kind).reshape(shape).copy()


def to_text(encoded: Any, *, sort_keys: bool, is_long: bool) -> str:
    """Return JSON as text: indented, or if it is long a value a line, which the fast encoder can write."""
    if is_long:
        return json.dumps(encoded, separators=(",\n", ": "), sort_keys=sort_keys, allow_nan=False)
    return json.dumps(encoded, indent=2, sort_keys=sort_keys, allow_nan=False)


def _encode_int(value: int) -> Any:
    return value if -_PLAIN_INT <= value < _PLAIN_INT else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _decode_float(content: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]


def _decode_dtype(content: str) -> torch.dtype:
    dtype = vars(torch).get(content)  # not getattr: it imports missing names
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


_LEAF_ENCODERS: dict[type, Callable[[Any], Any]] = {
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

_LEAF_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$float": _decode_float,
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$size": torch.Size,
    "$dtype": _decode_dtype,
    "$device": torch.device,
    "$numpy": _decode_numpy,
}


Steps = tuple[Any, ...]

# Of a state that is saved: it can be read back wherever in a program that is done.
MOST_DEPTH = 100

# What a key, or a member of one that is a tuple, may be.
_KEYS = (str, int, float, bool, type(None))

LONG = 500  # values in a state whose JSON is not indented

# Reserved in a safetensors header for the metadata.
_RESERVED_NAMES = ("__metadata__",)


def _is_its_own_json(value: Any) -> bool:
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return -_PLAIN_INT <= value < _PLAIN_INT
    return kind is str or kind is bool or value is None


class Encoder:
    """Encode one part's state; `tensors` then holds its tensors by the names that the JSON uses.

    The tensors are not copies: write or copy them before training continues.

    Args:
        part: the name at the start of each error message.
    """

    def __init__(self, part: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain = True  # no tag was needed so far
        self.leaves = 0
        self._part = part
        self._name_of: dict[Hashable, str] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, steps: Steps = ()) -> Any:
        """Return the JSON of `value`, which is at `steps` below the root.

        Raises:
            CheckpointError: a value in it cannot be saved; the message says where and what to do.
        """
        leaf = encode_leaf(value)
        self.leaves += 1
        if leaf is not NotImplemented:
            self.plain &= not isinstance(leaf, dict)
            return leaf
        if isinstance(value, torch.Tensor):
            self.plain = False
            return {"$tensor": self._store(value, steps)}
        if (encoder := _CONTAINERS.get(type(value))) is not None:
            if len(steps) > MOST_DEPTH:
                raise CheckpointError(f"{self._part} is nested too deeply to be saved: more than {MOST_DEPTH} deep")
            return self._inside(value, steps, encoder)
        return self._encode_array(value, steps)

    def _inside(self, value: Any, steps: Steps, encoder: Callable[[Encoder, Any, Steps], Any]) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{self._where(steps)} contains itself; a state must be a tree")
        self._open.add(id(value))
        try:
            return encoder(self, value, steps)
        finally:
            self._open.discard(id(value))

    def _list(self, value: list[Any], steps: Steps) -> Any:
        return [self.encode(item, (*steps, index)) for index, item in enumerate(value)]

    def _tuple(self, value: tuple[Any, ...], steps: Steps) -> Any:
        self.plain = False
        return {"$tuple": self._list(list(value), steps)}

    def _dict(self, value: dict[Any, Any], steps: Steps) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            if all(map(_is_its_own_json, value.values())):
                self.leaves += len(value)
                return dict(value)
            return {key: self.encode(item, (*steps, key)) for key, item in value.items()}
        self.plain = False
        return {"$dict": self._pairs(value.items(), steps)}

    def _ordered(self, value: OrderedDict[Any, Any], steps: Steps) -> Any:
        self.plain = False
        encoded = {"$ordered": self._pairs(value.items(), steps)}
        metadata = getattr(value, "_metadata", None)  # the versions of modules, which loading needs
        if metadata is not None:
            encoded["$metadata"] = self.encode(metadata, (*steps, "_metadata"))
        return encoded

    def _counter(self, value: Counter[Any], steps: Steps) -> Any:
        self.plain = False
        return {"$counter": self._pairs(value.items(), steps)}

    def _pairs(self, items: Iterable[tuple[Any, Any]], steps: Steps) -> list[list[Any]]:
        return [[self._key(key, steps), self.encode(item, (*steps, key))] for key, item in items]

    def _key(self, key: Any, steps: Steps) -> Any:
        members = key if type(key) is tuple else (key,)
        if not all(type(member) in _KEYS for member in members):
            raise CheckpointError(
                f"{self._where(steps)} has the key {key!r:.80}, a {type(key).__qualname__}; "
                "keys may be strings, numbers, booleans, None and flat tuples of these"
            )
        return self.encode(key, steps)

    def _encode_array(self, value: Any, steps: Steps) -> Any:
        data = array_bytes(value)
        if data is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise CheckpointError(
                f"{self._where(steps)} is a {kind}; a state may hold dicts, lists, tuples, tensors, NumPy "
                "arrays and scalars, numbers, strings, booleans, bytes and None — give its content as these, "
                "or leave it out of state_dict()"
            )
        self.plain = False
        name = self._store(data, steps)
        return {"$array": {"tensor": name, "dtype": value.dtype.str, "shape": list(value.shape)}}

    def _store(self, tensor: torch.Tensor, steps: Steps) -> str:
        reason = tensor_file.unsupported(tensor)
        if reason:
            raise CheckpointError(f"{self._where(steps)} is {reason}")
        identity = tensor_file.identity(tensor)
        if identity in self._name_of:
            return self._name_of[identity]
        name = wanted = ".".join(map(str, steps)).encode("utf-8", "backslashreplace").decode() or "value"
        number = 2
        while name in self.tensors or name in _RESERVED_NAMES:
            name, number = f"{wanted}#{number}", number + 1
        self.tensors[name] = tensor
        self._name_of[identity] = name
        return name

    def _where(self, steps: Steps) -> str:
        text = self._part
        for step in steps:
            plain = isinstance(step, str) and step.isidentifier()
            text += f".{step}" if plain else f"[{step!r}]"
        return text


def encode(part: str, state: Any) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Return the JSON of a part's state and its tensors, which are not copies.

    Raises:
        CheckpointError: the state holds a value that cannot be saved.
    """
    encoder = Encoder(part)
    try:
        encoded = encoder.encode(state)
        text = to_text(encoded, sort_keys=encoder.plain, is_long=encoder.leaves > LONG)
    except RecursionError:
        raise CheckpointError(f"{part} is nested too deeply to be saved") from None
    if len(text) > untrusted.MOST_JSON_BYTES:  # it is ASCII
        raise CheckpointError(
            f"what of {part} is not a tensor takes {len(text):,} bytes of JSON, and at most "
            f"{untrusted.MOST_JSON_BYTES:,} are read back; give long lists of numbers as tensors"
        )
    return text.encode(), encoder.tensors


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return the state whose JSON is `value`; `tensor` gives the tensor of a name, the same one each time.

    Raises:
        CheckpointError: the JSON is not one that `Encoder` writes.
    """
    return _decode(value, _Given(tensor))


class _Given:
    """The tensors of a state, by name; each array may be used once."""

    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self.tensor = tensor
        self._of_arrays: set[str] = set()

    def array(self, name: str) -> torch.Tensor:
        """Return the bytes of a NumPy array: a copy, shared with no other value."""
        if name in self._of_arrays:
            raise CheckpointError(f"{name!r:.80} is the content of two arrays")
        self._of_arrays.add(name)
        return self.tensor(name)


def _decode(value: Any, given: _Given) -> Any:
    if isinstance(value, list):
        return [_decode(item, given) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((name for name in value if name.startswith("$")), None)
    if tag is None:
        return {name: _decode(item, given) for name, item in value.items()}
    if tag in _LEAF_DECODERS:
        return _decode_leaf(tag, value[tag])
    if tag not in _TAGS:
        raise CheckpointError(f"{tag!r:.80} is not known to this version of tr-ckpt; a newer one wrote it")
    try:
        return _TAGS[tag](value, given)
    except CheckpointError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"the content of {tag!r} cannot be read: {error}") from error


def _decode_leaf(tag: str, content: Any) -> Any:
    try:
        return _LEAF_DECODERS[tag](content)
    except CheckpointError:
        raise
    except Exception as error:  # any error of a constructor means that the file is wrong
        raise CheckpointError(f"{{{tag!r}: {content!r:.80}}} cannot be read: {error}") from error


def _decode_pairs(pairs: Any, given: _Given) -> list[tuple[Any, Any]]:
    decoded = [(_decode(key, given), _decode(item, given)) for key, item in pairs]
    for key, _ in decoded:
        members = key if type(key) is tuple else (key,)
        if not all(type(member) in _KEYS for member in members):
            raise TypeError(f"a {type(key).__name__} is a key")
    untrusted.check_keys(key for key, _ in decoded)
    return decoded


def _decode_ordered(value: dict[str, Any], given: _Given) -> Any:
    ordered = OrderedDict(_decode_pairs(value["$ordered"], given))
    if "$metadata" in value:
        ordered._metadata = _decode(value["$metadata"], given)  # pyright: ignore[reportAttributeAccessIssue]
    return ordered


def _decode_array(value: dict[str, Any], given: _Given) -> Any:
    array = value["$array"]
    return array_from_bytes(given.array(array["tensor"]), array["dtype"], array["shape"])


_CONTAINERS: dict[type, Callable[[Encoder, Any, Steps], Any]] = {
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    OrderedDict: Encoder._ordered,
    Counter: Encoder._counter,
}

_TAGS: dict[str, Callable[[dict[str, Any], _Given], Any]] = {
    "$tensor": lambda value, given: given.tensor(value["$tensor"]),
    "$tuple": lambda value, given: tuple(_decode(item, given) for item in value["$tuple"]),
    "$dict": lambda value, given: dict(_decode_pairs(value["$dict"], given)),
    "$ordered": _decode_ordered,
    "$counter": lambda value, given: Counter(dict(_decode_pairs(value["$counter"], given))),
    "$array": _decode_array,
}
