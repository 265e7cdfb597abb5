"""Check and convert the values of a dataclass when they are set, and report all that is wrong at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tr_args.aliases import aliases
from tr_args.construction import Given, generated_init, settle
from tr_args.conversion import convert_field
from tr_args.errors import NOTHING, ArgumentsError, Problem, RefusedError
from tr_args.schema import schema
from tr_args.suggestion import closest

# A long name that is so near to a field's can only be a slip; other attributes are the user's own business.
SLIP = 0.87
SLIP_LENGTH = 8

Rule = tuple[tuple[str, ...], str]
"""Names of the fields that do not go together, and what to change."""


class CheckedType(type):
    """Look at the arguments of a constructor call before the constructor does."""

    if not TYPE_CHECKING:  # a type checker shall see the dataclass's own constructor

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Return a new object, or raise `ArgumentsError` with everything that is wrong."""
            if not generated_init(cls):
                return type.__call__(cls, *args, **kwargs).check()
            return build(cls, {name: Given(value) for name, value in kwargs.items()}, positional=args)

        @property
        def __signature__(cls) -> inspect.Signature:
            """The constructor's parameters, for `help` and editors."""
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


class Checked(metaclass=CheckedType):
    """A base for dataclasses whose values are converted to the fields' types on every assignment.

    Former names (`Alias`) and unknown ones are dealt with before the dataclass's own `__init__` runs, so that
    subclasses declared with `@dataclass` need nothing special.

    Attributes:
        num_assignments: how many values were assigned since the object was built: who works with the values sees by it
            that some may have changed.
    """

    num_assignments: ClassVar[int] = 0
    _origins: ClassVar[Mapping[str, str]] = MappingProxyType({})
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        self._complete()

    def __setattr__(self, name: str, value: Any) -> None:
        spec = schema(type(self)).get(name)
        if spec is None:
            self._refuse_slip(name)
            object.__setattr__(self, name, value)
            return
        building = "_building" in self.__dict__
        origin = self._origins.get(name, "default") if building else "assignment"
        try:
            converted = convert_field(spec, value)
        except RefusedError as refusal:
            shown = "***" if spec.secret else value
            raise ArgumentsError([Problem(name, shown, str(refusal), origin)]) from None
        object.__setattr__(self, name, converted)
        if not building:
            object.__setattr__(self, "_origins", {**self._origins, name: origin})
            object.__setattr__(self, "num_assignments", self.num_assignments + 1)

    def origin(self, name: str) -> str:
        """Return where the value of a field came from: `default`, `call`, `file NAME`, `command line`, ..."""
        return self._origins.get(name, "default")

    def check(self) -> Self:
        """Fill in what follows from other values, check how all values go together, and return the object.

        The constructor does this; after assignments it is for whoever uses the values (a Trainer does).

        Raises:
            ArgumentsError: with every problem.
        """
        self._complete()
        if problems := list(self._conflicts()):
            raise ArgumentsError(problems)
        return self

    def _conflicts(self) -> Iterator[Problem]:
        for names, message in self._rules():
            (first, value, origin), *others = ((name, getattr(self, name), self.origin(name)) for name in names)
            yield Problem(first, value, message, origin, tuple(others))

    def _complete(self) -> None:
        """Set the fields whose values follow from others."""

    def _rules(self) -> Iterator[Rule]:
        """Yield which values do not go together."""
        yield from ()

    def _refuse_slip(self, name: str) -> None:
        if name.startswith("_") or len(name) < SLIP_LENGTH:
            return
        if name in self.__dict__ or name in self.__dataclass_fields__:
            return
        if inspect.getattr_static(type(self), name, self) is not self:
            return
        meant = closest(name, schema(type(self)), cutoff=SLIP)
        if meant is not None:
            message = f"unknown argument {name}; did you mean {meant}?"
            raise ArgumentsError([Problem(name, NOTHING, message, "assignment")])


def build(cls: type[Any], given: dict[str, Given], positional: tuple[Any, ...] = ()) -> Any:
    """Return an object of the checked dataclass `cls`.

    Args:
        cls: a subclass of `Checked` with a constructor that `dataclass` generated.
        given: values by name, with their origins; former names allowed.
        positional: values in the order of the constructor's positional parameters.

    Raises:
        ArgumentsError: with everything that is wrong with the values, each alone and together.
    """
    problems: list[Problem] = []
    values, origins, complete = settle(cls, given, problems, positional=positional)
    if not complete:
        raise ArgumentsError(problems)
    instance = object.__new__(cls)
    instance.__dict__["_origins"] = origins
    instance.__dict__["_building"] = True
    try:
        instance.__init__(**values)
        # Again, for subclasses whose own `__post_init__` does not call this class's.
        instance._complete()
        former = aliases(cls)
        refused = {former[p.field].target if p.field in former else p.field for p in problems}
        problems += [problem for problem in instance._conflicts() if not refused & _fields(problem)]
    except ArgumentsError as error:
        raise ArgumentsError(problems + error.problems) from None
    except Exception as error:
        if problems:  # it may only have met a default that stands in for a refused value
            raise ArgumentsError(problems) from error
        raise
    del instance.__dict__["_building"]
    if problems:
        raise ArgumentsError(problems)
    return instance


def _fields(problem: Problem) -> set[str]:
    return {problem.field, *(name for name, _, _ in problem.others)}
