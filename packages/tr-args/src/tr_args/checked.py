"""Check and convert the values of a dataclass when they are set, and report all problems at once.

`resolve` converts the values of a constructor call, a file or a command line. It handles former names, unknown names,
wrong types and missing values. `build` makes the object. `Checked` converts each value that is assigned later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from tr_args.aliases import Alias, aliases
from tr_args.conversion import convert, convert_field
from tr_args.errors import MOST_GUESSED, NOTHING, ArgumentsError, Problem, RefusedError, closest, did_you_mean, show
from tr_args.schema import FieldSpec, schema


@dataclass(frozen=True)
class Given:
    """A value as it was given.

    Attributes:
        value: the value.
        origin: where it came from.
        name: the name it was given under; empty if that is the field's.
    """

    value: Any
    origin: str = "call"
    name: str = ""


class Resolved(NamedTuple):
    """Converted values and their origins by field. `complete` is true if every required field has a value."""

    values: dict[str, Any]
    origins: dict[str, str]
    complete: bool


def resolve(
    cls: type, given: Mapping[str, Given], problems: list[Problem], *, positional: tuple[Any, ...] = ()
) -> Resolved:
    """Convert the given values for the dataclass `cls`, and append those it cannot use to `problems`."""
    given = {**_by_position(cls, positional, given, problems), **given}
    known = without_aliases(cls, given, problems)
    values: dict[str, Any] = {}
    fields = schema(cls)
    parameters = _parameters(cls)
    for name, item in known.items():
        if name not in fields:
            if name in parameters:  # an InitVar
                values[name] = item.value
            else:
                text = unknown_argument(cls, name) if len(problems) < MOST_GUESSED else f"unknown argument {name}"
                problems.append(Problem(name, NOTHING, text, item.origin, is_unknown=True))
            continue
        try:
            values[name] = convert_field(fields[name], item.value)
        except RefusedError as refusal:
            problems.append(fields[name].problem(item.value, refusal, item.origin, name=item.name))
    missing = [name for name, spec in fields.items() if spec.required and name not in known]
    problems += [Problem(name, NOTHING, f"{name} is missing; {cls.__name__} needs it") for name in missing]
    complete = all(name in values for name, spec in fields.items() if spec.required)
    return Resolved(values, {name: known[name].origin for name in values}, complete)


def unknown_argument(cls: type, name: str) -> str:
    """Return the message for a name that is not an argument of `cls`."""
    retired = getattr(cls, "_retired", {})
    if name in retired:
        return f"argument {name} no longer exists; {retired[name]}"
    return f"unknown argument {name}{did_you_mean(name, schema(cls), also=aliases(cls))}"


def generated_init(cls: type) -> bool:
    """Return whether the constructor of `cls` takes its fields by name, like those that `dataclass` generates."""
    return _parameters(cls) >= set(schema(cls)) and not _is_variadic(cls)


def _rename(cls: type, name: str, alias: Alias, item: Given) -> Given:
    """Convert a value given under a former name to one of the field.

    Raises:
        RefusedError: the value does not fit the former argument.
    """
    alias.notice()
    return Given(alias.write(convert(item.value, alias.type_for(cls))), item.origin, item.name or name)


def without_aliases(cls: type, given: Mapping[str, Given], problems: list[Problem]) -> dict[str, Given]:
    """Replace former names by their fields; two names with different values are a problem.

    None for a former name says nothing: it was the default of many.
    """
    former = aliases(cls)
    known = {name: item for name, item in given.items() if name not in former}
    for name in (name for name, item in given.items() if name in former and item.value is not None):
        alias, item = former[name], given[name]
        try:
            renamed = _rename(cls, name, alias, item)
        except RefusedError as refusal:
            problems.append(Problem(name, item.value, str(refusal), item.origin))
            continue
        other = known.get(alias.target)
        if other is None or _gives_way(cls, alias, other):
            known[alias.target] = renamed
        elif not _agree(cls, alias, item, other):
            message = f"are two names of one argument with different values; keep {alias.target}"
            problems.append(
                Problem(alias.target, other.value, message, other.origin, ((name, item.value, item.origin),))
            )
    return known


def _gives_way(cls: type, alias: Alias, other: Given) -> bool:
    try:
        return alias.gives_way is not None and convert_field(schema(cls)[alias.target], other.value) == alias.gives_way
    except RefusedError:
        return False  # reported where the field itself is converted


def _agree(cls: type, alias: Alias, item: Given, other: Given) -> bool:
    try:
        value = convert(item.value, alias.type_for(cls))
        target = convert_field(schema(cls)[alias.target], other.value)
    except RefusedError:
        return True  # reported where the field itself is converted
    return alias.read(target) == value or alias.write(value) == target


def _by_position(
    cls: type, positional: tuple[Any, ...], given: Mapping[str, Given], problems: list[Problem]
) -> dict[str, Given]:
    if not positional:
        return {}
    names = [
        name
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ][1:]
    if len(positional) > len(names):
        example = f"NAME={show(positional[len(names)])}"
        counts = f"{len(names)} positional argument(s), got {len(positional)}"
        message = f"takes {counts}; name the others: {example}"
        problems.append(Problem("", NOTHING, f"{cls.__name__} {message}"))
    placed = dict(zip(names, positional, strict=False))
    for name in placed.keys() & given.keys():
        problems.append(Problem(name, NOTHING, f"{name} is given twice, by position and by name; keep one"))
    return {name: Given(value) for name, value in placed.items()}


def _parameters(cls: type) -> set[str]:
    code = getattr(cls.__init__, "__code__", None)
    if code is None:
        return set()
    return set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def _is_variadic(cls: type) -> bool:
    variadic = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return bool(cls.__init__.__code__.co_flags & variadic)


# A long name this similar to a field's is a typo. Users may set any other attribute.
SLIP = 0.87
SLIP_LENGTH = 8

Rule = tuple[tuple[str, ...], str]
"""Names of fields that contradict each other, and what to change."""


class CheckedType(type):
    """Check the arguments of a constructor call before the constructor runs."""

    if not TYPE_CHECKING:  # type checkers see the dataclass's own constructor

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Return a new object, or raise `ArgumentsError` with everything that is wrong."""
            if not generated_init(cls):
                instance = cls.__new__(cls, *args, **kwargs)
                _initialize(instance, *args, **kwargs)
                return instance._check(at_use=False)
            return build(cls, {name: Given(value) for name, value in kwargs.items()}, positional=args)

        @property
        def __signature__(cls) -> inspect.Signature:
            """The constructor's parameters, for `help` and editors."""
            signature = inspect.signature(cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


class Checked(metaclass=CheckedType):
    """A base for dataclasses whose values are converted to the fields' types on every assignment.

    Former names (`Alias`) and unknown names are handled before the dataclass's own `__init__` runs. So subclasses
    declared with `@dataclass` need nothing special.

    What was given is checked before the class's own `__post_init__` runs. What a class declares as a default or assigns
    there is its own: a value that does not fit stays as it is.

    Attributes:
        num_assignments: values assigned since the object was built. A reader compares it to see that some may have
            changed.
        build_s: seconds that building and checking the object took.
    """

    num_assignments: ClassVar[int] = 0
    build_s: ClassVar[float] = 0.0
    _origins: ClassVar[Mapping[str, str]] = MappingProxyType({})
    _by_class: ClassVar[frozenset[str]] = frozenset()  # fields that the class's own `__post_init__` set
    _followed: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # filled in from others: the values before that
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        runs_own = vars(self).pop("_runs_own", False)  # what a launcher gives is checked
        self._complete()
        if runs_own:
            vars(self)["_runs_own"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        spec = schema(type(self)).get(name)
        if spec is None:
            self._refuse_slip(name)
            self._refuse_fixed(name, value)
            object.__setattr__(self, name, value)
            return
        if "_runs_own" in self.__dict__:
            self._keep_own(spec, value)
            return
        origin = self._origin_of(spec, value)
        try:
            converted = convert_field(spec, value)
        except RefusedError as refusal:
            if origin != "default" or not self._is_declaring:
                raise ArgumentsError([spec.problem(value, refusal, origin)]) from None
            converted = value
        object.__setattr__(self, name, converted)
        if name in self._by_class:
            vars(self)["_by_class"] = self._by_class - {name}
        if name in self._followed:
            vars(self)["_followed"] = {key: value for key, value in self._followed.items() if key != name}
        if "_building" not in self.__dict__ and origin != "default":
            object.__setattr__(self, "_origins", {**self._origins, name: origin})
        if origin == "assignment":
            object.__setattr__(self, "num_assignments", self.num_assignments + 1)

    @property
    def _is_declaring(self) -> bool:
        """Whether the constructor that `dataclass` generated sets the fields, which it does before `__post_init__`."""
        return "__post_init__" in self.__dict__

    def _origin_of(self, spec: FieldSpec, value: Any) -> str:
        """Return where a value comes from that is being set."""
        if "_building" in self.__dict__:
            return self._origins.get(spec.name, "default")
        if self._is_declaring:  # called by a constructor of the class's own, which may have given any of them
            return "default" if not spec.required and _is_same(value, spec.make_default()) else "call"
        return "assignment"

    def origin(self, name: str) -> str:
        """Return where the value of a field came from: `default`, `call`, `file NAME`, `command line`, ..."""
        return self._origins.get(name, "default")

    def check(self) -> Self:
        """Fill in values that follow from others, check all values together, and return the object.

        The constructor calls it. After assignments, call it before the values are used; a Trainer does.

        Raises:
            ArgumentsError: with every problem.
        """
        return self._check(at_use=True)

    def _check(self, *, at_use: bool) -> Self:
        followed, vars(self)["_followed"] = self._followed, {}
        vars(self).update(followed)  # what followed from others may follow otherwise now
        self._complete()
        if problems := [*(self._unfit() if at_use else ()), *self._conflicts(at_use=at_use)]:
            raise ArgumentsError(problems)
        return self

    def _keep_own(self, spec: FieldSpec, value: Any) -> None:
        """Set a field as the class's own `__post_init__` does: as it is, if it is not a field that is read here too."""
        if value is vars(self).get(spec.name, NOTHING):
            return
        if spec.name in _base_fields(type(self)):
            with suppress(RefusedError):  # `_unfit` reports it, unless it is replaced before it is used
                value = convert_field(spec, value)
        vars(self)[spec.name] = value
        vars(self)["_by_class"] = self._by_class | {spec.name}

    def _unfit(self) -> Iterator[Problem]:
        """Yield the values that a class assigned to fields of its base, and that do not fit them. None is unset."""
        for name in sorted(self._by_class & _base_fields(type(self))):
            spec, value = schema(type(self))[name], getattr(self, name)
            try:
                convert_field(spec, value)
            except RefusedError as refusal:
                if value is not None:
                    yield spec.problem(value, refusal, f"__post_init__ of {type(self).__name__}")

    def _conflicts(self, *, at_use: bool) -> Iterator[Problem]:
        """Yield what does not fit together; until the values are used, only what the class did not bring about."""
        for names, message in self._rules():
            if at_use or not any(map(self._is_own, names)) or any(map(self._is_given, names)):
                yield self._conflict(names, message)
        for names, message in self._rules_of_effect():
            if not self._is_own(names[0]):
                yield self._conflict(names, message)

    def _conflict(self, names: tuple[str, ...], message: str) -> Problem:
        (first, value, origin), *others = ((name, getattr(self, name), self.origin(name)) for name in names)
        return Problem(first, value, message, origin, tuple(others))

    def _is_own(self, name: str) -> bool:
        """Return whether a value is the class's: it declares the default or assigned it, and its base did not."""
        declared = not issubclass(_base(type(self)), schema(type(self))[name].owner)
        return name in self._by_class or (declared and self.origin(name) == "default")

    def _is_given(self, name: str) -> bool:
        return name not in self._by_class and self.origin(name) != "default"

    def _follow(self, name: str, value: Any) -> None:
        """Fill in a field whose value follows from others. A value that was assigned stays, unless it says 'unset'."""
        before = getattr(self, name)
        if before is None or self.origin(name) != "assignment":
            vars(self)["_followed"] = {name: before, **self._followed}
            vars(self)[name] = value

    def _complete(self) -> None:
        """Fill in the fields whose values follow from others."""

    def _rules(self) -> Iterator[Rule]:
        """Yield the values that contradict each other. The fields of the class that has them are its own."""
        yield from ()

    def _rules_of_effect(self) -> Iterator[Rule]:
        """Yield the values that have no effect beside others."""
        yield from ()

    def _refuse_fixed(self, name: str, value: Any) -> None:
        """Raise AttributeError for a property without a setter, with what to do instead."""
        attribute = inspect.getattr_static(type(self), name, None)
        if isinstance(attribute, property) and attribute.fset is None:
            instead = getattr(type(self), "_follows", {}).get(name, "set what it follows from")
            raise AttributeError(f"{name} = {value!r} cannot be set, it is a property; {instead}")

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
            raise ArgumentsError([Problem(name, NOTHING, message, "assignment", is_unknown=True)])


def build(cls: type[Any], given: dict[str, Given], positional: tuple[Any, ...] = ()) -> Any:
    """Return an object of the checked dataclass `cls`.

    Args:
        cls: a subclass of `Checked` whose constructor was generated by `dataclass`.
        given: values by name, with their origins; former names allowed.
        positional: values in the order of the constructor's positional parameters.

    Raises:
        ArgumentsError: with every problem of the values, alone and together.
    """
    problems, since_s = list[Problem](), perf_counter()
    values, origins, complete = resolve(cls, given, problems, positional=positional)
    if not complete:
        raise ArgumentsError(problems)
    instance = object.__new__(cls)
    instance.__dict__["_origins"] = origins
    instance.__dict__["_building"] = True
    try:
        _initialize(instance, **values)
        # Repeated for subclasses whose own `__post_init__` does not call this class's.
        instance._complete()
        former = aliases(cls)
        refused = {former[p.field].target if p.field in former else p.field for p in problems}
        problems += [problem for problem in instance._conflicts(at_use=False) if not refused & _fields_of(problem)]
    except ArgumentsError as error:
        raise ArgumentsError(problems + error.problems) from None
    except Exception as error:
        if problems:  # the default in place of a refused value may have caused it
            raise ArgumentsError(problems) from error
        raise
    del instance.__dict__["_building"]
    if problems:
        raise ArgumentsError(problems)
    instance.__dict__["build_s"] = perf_counter() - since_s
    return instance


def _initialize(instance: Checked, *args: Any, **kwargs: Any) -> None:
    """Call the constructor; what the class's own `__post_init__` assigns is the class's."""

    def post_init(*init_vars: Any) -> None:
        vars(instance)["_runs_own"] = True
        del vars(instance)["__post_init__"]  # every default was set
        try:
            type(instance).__post_init__(instance, *init_vars)
        finally:
            vars(instance).pop("_runs_own", None)

    vars(instance)["__post_init__"] = post_init
    try:
        instance.__init__(*args, **kwargs)
    finally:
        vars(instance).pop("__post_init__", None)


def _base(cls: type) -> type:
    """Return the class that has the rules of `cls`."""
    return next(base for base in cls.__mro__ if "_rules" in vars(base))


@functools.cache
def _base_fields(cls: type) -> frozenset[str]:
    """Return the fields of `cls` that the class with its rules has too."""
    return frozenset(getattr(_base(cls), "__dataclass_fields__", ()))


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _fields_of(problem: Problem) -> set[str]:
    return {problem.field, *(name for name, _, _ in problem.others)}
