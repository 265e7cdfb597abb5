"""Run the few pickle instructions that plain state needs. None of them calls anything by itself.

Python's own unpickler is not used. Some instructions make it allocate any amount of memory: a memo index of 2^32, a
length of 2^62. Others overflow the interpreter's stack, for example a deeply nested key. Both happen whichever names
are allowed. Here work and memory are proportional to the pickle. Protocols 2 to 5 are read, without the instructions
that neither `torch.save` nor `pickle.dumps` writes for plain state.

Source: the descriptions of the instructions in Python's `pickletools`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.untrusted import MOST_COLLISIONS, may_collide

# The limit for a number, in bytes: the time to parse one as text grows with the square of its length.
MOST_BYTES_OF_NUMBER = 65_536

_SIMPLE_KEYS = (str, int, float, bool, type(None), bytes)


class Machine:
    """One run over a pickle.

    Args:
        data: the pickle.
        find: returns the object for a name, such as `collections.OrderedDict`.
        persistent: returns the object for an identifier of something outside the pickle.
        call: returns the result of calling such an object with arguments.
        build: sets the state of an object that `call` returned.
    """

    def __init__(
        self,
        data: bytes,
        *,
        find: Callable[[str], Any],
        persistent: Callable[[Any], Any],
        call: Callable[[Any, tuple[Any, ...]], Any],
        build: Callable[[Any, Any], None],
    ) -> None:
        self._data = data
        self._place = 0
        self._find, self._persistent, self._call, self._build = find, persistent, call, build
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._alike: Counter[tuple[int, int]] = Counter()

    def run(self) -> Any:
        """Return the value of the pickle.

        Raises:
            CheckpointError: it holds unsupported content.
            DamagedCheckpointError: it is not a pickle, or is cut off.
        """
        while (code := self._byte()) != _STOP:
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise DamagedCheckpointError(
                    f"its instruction {bytes([code])!r} at byte {self._place - 1:,} is none that plain state needs"
                )
            instruction(self)
        value = self._pop()
        if self._stack or self._marked:
            raise DamagedCheckpointError("it ends in the middle of a value")
        return value

    def _byte(self) -> int:
        if self._place >= len(self._data):
            raise DamagedCheckpointError("it is cut off")
        self._place += 1
        return self._data[self._place - 1]

    def _take(self, size: int) -> bytes:
        start, end = self._place, self._place + size
        if end > len(self._data):
            raise DamagedCheckpointError(f"it is cut off: {size:,} bytes are to follow byte {start:,}")
        self._place = end
        return self._data[start:end]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._place)
        if end < 0:
            raise DamagedCheckpointError("it is cut off")
        line = self._take(end - self._place)
        self._place += 1
        return line.decode()

    def _pop(self) -> Any:
        if not self._stack:
            raise DamagedCheckpointError("an instruction lacks what it is to work on")
        return self._stack.pop()

    def _top(self, kind: type | tuple[type, ...]) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise DamagedCheckpointError("an instruction is to work on another kind of value")
        return self._stack[-1]

    def _to_mark(self) -> list[Any]:
        if not self._marked:
            raise DamagedCheckpointError("the begin of a group is missing")
        group, self._stack = self._stack, self._marked.pop()
        return group

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _skip(self, size: int) -> None:
        self._take(size)

    def _frame(self) -> None:
        size = self._number(8)
        if size > len(self._data) - self._place:
            raise DamagedCheckpointError(f"it is cut off: {size:,} bytes are to follow byte {self._place:,}")

    def _push_number(self, size: int) -> None:
        length = self._number(size)
        if length > MOST_BYTES_OF_NUMBER:
            raise CheckpointError(f"it holds a number of {length:,} bytes; at most {MOST_BYTES_OF_NUMBER:,} are read")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def _push_text(self, size: int) -> None:
        self._stack.append(self._take(self._number(size)).decode("utf-8", "surrogatepass"))

    def _push_bytes(self, size: int) -> None:
        self._stack.append(self._take(self._number(size)))

    def _push_tuple(self, size: int) -> None:
        if len(self._stack) < size:
            raise DamagedCheckpointError("an instruction lacks what it is to work on")
        start = len(self._stack) - size
        self._stack[start:] = [tuple(self._stack[start:])]

    def _push_group(self, make: Callable[[list[Any]], Any]) -> None:
        group = self._to_mark()
        self._stack.append(make(group))

    def _append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def _extend(self) -> None:
        group = self._to_mark()
        self._top(list).extend(group)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._put(self._top(dict), [key, value])

    def _set_items(self) -> None:
        group = self._to_mark()
        self._put(self._top(dict), group)

    def _put(self, into: dict[Any, Any], group: list[Any]) -> None:
        if len(group) % 2:
            raise DamagedCheckpointError("a key has no value")
        for key, value in zip(group[::2], group[1::2], strict=True):
            into[self._key(key, into)] = value

    def _add_items(self) -> None:
        group = self._to_mark()
        into = self._top(set)
        for key in group:
            into.add(self._key(key, into))

    def _frozen_set(self, group: Iterable[Any]) -> frozenset[Any]:
        into: set[Any] = set()
        for key in group:
            into.add(self._key(key, into))
        return frozenset(into)

    def _key(self, key: Any, into: Any) -> Any:
        members = key if type(key) is tuple else (key,)
        if not all(type(member) in _SIMPLE_KEYS for member in members):
            raise CheckpointError(
                f"it has a {type(key).__name__} as a key; keys may be strings, numbers, booleans, None, bytes and flat "
                "tuples of these"
            )
        if may_collide(key):
            self._alike[id(into), hash(key)] += 1
            if self._alike[id(into), hash(key)] > MOST_COLLISIONS:
                raise CheckpointError("its keys are made to be slow to look up: many have one hash")
        return key

    def _remember(self, place: int) -> None:
        self._memo[place] = self._top(object)

    def _recall(self, size: int) -> None:
        place = self._number(size)
        if place not in self._memo:
            raise DamagedCheckpointError(f"it refers to value {place:,}, which is not there yet")
        self._stack.append(self._memo[place])

    def _name(self) -> None:
        module = self._line()
        self._stack.append(self._find(f"{module}.{self._line()}"))

    def _name_of_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise DamagedCheckpointError("a name is no text")
        self._stack.append(self._find(f"{module}.{name}"))

    def _reduce(self) -> None:
        given, callee = self._pop(), self._pop()
        if not isinstance(given, tuple):
            raise DamagedCheckpointError("what a name is given is no tuple")
        self._stack.append(self._call(callee, given))

    def _give_state(self) -> None:
        state = self._pop()
        self._build(self._top(object), state)

    def _outside(self) -> None:
        self._stack.append(self._persistent(self._pop()))

    def _push(self, value: Any) -> None:
        self._stack.append(value)


_STOP = ord(".")

_Instruction = Callable[[Machine], None]

_VALUES: dict[bytes, _Instruction] = {
    b"N": lambda run: run._push(None),
    b"\x88": lambda run: run._push(True),
    b"\x89": lambda run: run._push(False),
    b"J": lambda run: run._push(struct.unpack("<i", run._take(4))[0]),
    b"K": lambda run: run._push(run._byte()),
    b"M": lambda run: run._push(run._number(2)),
    b"G": lambda run: run._push(struct.unpack(">d", run._take(8))[0]),
    b"\x8a": lambda run: run._push_number(1),
    b"\x8b": lambda run: run._push_number(4),
    b"X": lambda run: run._push_text(4),
    b"\x8c": lambda run: run._push_text(1),
    b"\x8d": lambda run: run._push_text(8),
    b"B": lambda run: run._push_bytes(4),
    b"C": lambda run: run._push_bytes(1),
    b"\x8e": lambda run: run._push_bytes(8),
}

_CONTAINERS: dict[bytes, _Instruction] = {
    b"(": Machine._mark,
    b"]": lambda run: run._push([]),
    b"}": lambda run: run._push({}),
    b"\x8f": lambda run: run._push(set()),
    b")": lambda run: run._push(()),
    b"\x85": lambda run: run._push_tuple(1),
    b"\x86": lambda run: run._push_tuple(2),
    b"\x87": lambda run: run._push_tuple(3),
    b"t": lambda run: run._push_group(tuple),
    b"\x91": lambda run: run._push_group(run._frozen_set),
    b"a": Machine._append,
    b"e": Machine._extend,
    b"s": Machine._set_item,
    b"u": Machine._set_items,
    b"\x90": Machine._add_items,
}

_OTHERS: dict[bytes, _Instruction] = {
    b"\x80": lambda run: run._skip(1),  # the protocol
    b"\x95": Machine._frame,
    b"q": lambda run: run._remember(run._byte()),
    b"r": lambda run: run._remember(run._number(4)),
    b"\x94": lambda run: run._remember(len(run._memo)),
    b"h": lambda run: run._recall(1),
    b"j": lambda run: run._recall(4),
    b"c": Machine._name,
    b"\x93": Machine._name_of_stack,
    b"R": Machine._reduce,
    b"b": Machine._give_state,
    b"Q": Machine._outside,
}

_INSTRUCTIONS = {code[0]: work for code, work in (_VALUES | _CONTAINERS | _OTHERS).items()}
