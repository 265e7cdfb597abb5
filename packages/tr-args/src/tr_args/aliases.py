"""Accept a former name of an argument wherever its present name is accepted."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from tr_args.schema import schema

logger = logging.getLogger("tr_args")
_noticed: set[str] = set()


class Alias:
    """A class attribute that stands for a field under a former name.

    It can be passed to the constructor, set, read, and given in files and on command lines. The first use of
    each name in a process logs one warning. A subclass may declare a field of that name: then it is only that.

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
        if instance is None:  # which `dataclass` would take for the default of a field of this name
            raise AttributeError(self.name)
        if self._is_field_of(instance):
            if self.name not in vars(instance):
                raise AttributeError(self.name)
            return vars(instance)[self.name]
        self.notice()
        return self.read(getattr(instance, self.target))

    def __set__(self, instance: object, value: Any) -> None:
        # Without a plain default the class has no attribute that would go before this one.
        if self._is_field_of(instance):
            vars(instance)[self.name] = value
            return
        self.notice()
        setattr(instance, self.target, self.write(value))

    def notice(self) -> None:
        """Log, once a process, that there is a newer name."""
        if self.name not in _noticed:
            _noticed.add(self.name)
            logger.warning("%s is a former name and still works; the argument is called %s", self.name, self.target)

    def _is_field_of(self, instance: object) -> bool:
        return self.name in getattr(instance, "__dataclass_fields__", ())

    def type_for(self, cls: type) -> Any:
        """Return the type of this name's values in the dataclass `cls`."""
        return self.hint if self.hint is not None else schema(cls)[self.target].hint


@functools.cache
def aliases(cls: type) -> dict[str, Alias]:
    """Return the former names that the dataclass `cls` accepts; what it declares under such a name goes before."""
    fields, declared = schema(cls), {field.name for field in dataclasses.fields(cls)}
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if value is inspect.getattr_static(cls, name) and isinstance(value, Alias)
        if name not in declared and value.target in fields
    }
