"""Accept a former name of an argument wherever its present name is accepted."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from tr_args.schema import schema

logger = logging.getLogger("tr_args")
_noticed: set[str] = set()


class Alias:
    """A class attribute that stands for a field under a former name.

    It can be passed to the constructor, set, read, and given in files and on command lines. The first use of
    each name in a process logs one warning.

    Attributes:
        target: name of the field.
        hint: type of the former argument; None if it is the field's.
    """

    def __init__(
        self,
        target: str,
        *,
        hint: Any = None,
        write: Callable[[Any], Any] | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> None:
        """Describe the relation.

        Args:
            target: name of the field.
            hint: type of the former argument where it differs.
            write: turns a value of the former argument into one of the field.
            read: turns a value of the field into one of the former argument.
        """
        self.target = target
        self.hint = hint
        self.write = write or (lambda value: value)
        self.read = read or (lambda value: value)
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        self.notice()
        return self.read(getattr(instance, self.target))

    def __set__(self, instance: object, value: Any) -> None:
        self.notice()
        setattr(instance, self.target, self.write(value))

    def notice(self) -> None:
        """Log, once a process, that there is a newer name."""
        if self.name not in _noticed:
            _noticed.add(self.name)
            logger.warning("%s is a former name and still works; the argument is called %s", self.name, self.target)

    def type_for(self, cls: type) -> Any:
        """Return the type of this name's values in the dataclass `cls`."""
        return self.hint if self.hint is not None else schema(cls)[self.target].hint


@functools.cache
def aliases(cls: type) -> dict[str, Alias]:
    """Return the former names that the dataclass `cls` accepts; a field of that name goes before."""
    fields = schema(cls)
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, Alias) and name not in fields and value.target in fields
    }
