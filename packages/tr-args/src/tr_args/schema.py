"""Read the fields of a dataclass: type, default, constraints and topic. `argument` declares a field with its flags."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from tr_args.constraints import Constraint, Fact
from tr_args.errors import Problem, RefusedError
from tr_args.metadata import hint_of_words, optional
from tr_log.masking import MASK, is_secret

FactKind = TypeVar("FactKind", bound=Fact)


@dataclass(frozen=True)
class FieldSpec:
    """One field of a dataclass.

    Attributes:
        name: the field's name.
        declared: its annotation.
        hint: its type, with constraints and facts as `Annotated`; optional if its default is None, and a list if its
            metadata says that its flag takes several words.
        default: its default, or `MISSING`.
        default_factory: makes its default, or `MISSING`.
        metadata: the field's metadata, which has settings of its flag; see `tr_args.metadata`.
        owner: the class of the hierarchy that declares it.
    """

    name: str
    declared: Any
    hint: Any
    default: Any
    default_factory: Any
    metadata: Mapping[str, Any]
    owner: type

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING and self.default_factory is MISSING

    @property
    def must_be_given(self) -> bool:
        """Whether a command line must give it, though it may have a default."""
        return bool(self.metadata.get("required"))

    @property
    def is_bare_switch(self) -> bool:
        """Whether this is a `bool` without a default, which a parser takes as False."""
        return self.required and self.hint is bool

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints that narrow the type."""
        return _constraints(self.hint)

    @property
    def facts(self) -> tuple[Fact, ...]:
        """The facts stated at the field."""
        return _facts(self.hint)

    @property
    def secret(self) -> bool:
        """Whether the value must not be shown."""
        return any(constraint.secret for constraint in self.constraints)

    def hides(self, value: Any) -> bool:
        """Whether this value of the field must not be shown, by its constraints or by its name."""
        return self.secret or is_secret(self.name, value)

    def problem(self, value: Any, refusal: RefusedError, origin: str, *, name: str = "") -> Problem:
        """Return the problem of a refused value, not shown if it is a secret; `name` is what the user wrote."""
        return Problem(name or self.name, MASK if self.hides(value) else value, str(refusal), origin)

    def make_default(self) -> Any:
        """Return the default. Only for fields that have one."""
        return self.default if self.default_factory is MISSING else self.default_factory()


@functools.cache
def schema(cls: type) -> dict[str, FieldSpec]:
    """Return the fields of the dataclass `cls` that its constructor takes, by name, in order."""
    hints = _resolve(cls)
    return {
        field.name: FieldSpec(
            name=field.name,
            declared=hints[field.name],
            hint=_optional_if_none(hint_of_words(hints[field.name], field.metadata), field.default),
            default=field.default,
            default_factory=field.default_factory,
            metadata=field.metadata,
            owner=_owner(cls, field.name),
        )
        for field in dataclasses.fields(cls)
        if field.init
    }


@functools.cache
def facts(cls: type, fact: Fact) -> tuple[str, ...]:
    """Return the names of the fields of the dataclass `cls` that state `fact`, in order.

    For example, `facts(TrainingArguments, Numbers.SCHEDULE)` are the arguments that the schedule depends on.
    """
    return tuple(name for name, spec in schema(cls).items() if fact in spec.facts)


@functools.cache
def facts_of_kind(cls: type, kind: type[FactKind]) -> dict[str, FactKind]:
    """Return the facts of one kind by the names of the fields that state one, in order."""
    stated = ((name, fact) for name, spec in schema(cls).items() for fact in spec.facts)
    return {name: fact for name, fact in stated if isinstance(fact, kind)}


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in inspect.get_annotations(base))


def _not_stated(inherited: tuple[Fact, ...], own: tuple[Fact, ...]) -> list[Fact]:
    kinds = {type(fact) for fact in own}
    return [fact for fact in inherited if type(fact) not in kinds]


def _resolve(cls: type) -> dict[str, Any]:
    """Return each field's type; `Any` where it cannot be evaluated (names under TYPE_CHECKING)."""
    hints: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        owners = [base for base in cls.__mro__ if field.name in inspect.get_annotations(base)]
        hint, *inherited = (_evaluate(base, field.name) for base in owners)
        for (
            other
        ) in inherited:  # a subclass that declares a field again keeps constraints and facts it does not replace
            extras = [*(() if _constraints(hint) else _constraints(other)), *_not_stated(_facts(other), _facts(hint))]
            hint = Annotated[hint, *extras] if extras else hint
        hints[field.name] = hint
    return hints


def _evaluate(base: type, name: str) -> Any:
    alone = type(base.__name__, (), {"__annotations__": {name: inspect.get_annotations(base)[name]}})
    alone.__module__ = base.__module__
    try:
        return typing.get_type_hints(alone, include_extras=True)[name]
    except NameError:
        return Any


def _constraints(hint: Any) -> tuple[Constraint, ...]:
    if get_origin(hint) is not Annotated:
        return ()
    return tuple(extra for extra in get_args(hint)[1:] if isinstance(extra, Constraint))


def _facts(hint: Any) -> tuple[Fact, ...]:
    if get_origin(hint) is not Annotated:
        return ()
    return tuple(extra for extra in get_args(hint)[1:] if isinstance(extra, Fact))


def _optional_if_none(hint: Any, default: Any) -> Any:
    return hint if default is not None or hint is Any else optional(hint)


def argument(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Callable[[], Any] | Any = dataclasses.MISSING,
    metadata: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Return a dataclass field with a help text and further flag names.

    Args:
        aliases: further flags, such as `"--lr"` or `["--lr", "-l"]`.
        help: text for `--help`; by default the string under the field.
        default: the field's default.
        default_factory: makes the field's default.
        metadata: further metadata of the field: `choices` limits its values, and `nargs`, `metavar`, `type`,
            `required`, `const` and `action` are settings of its flag, as `argparse` has them.
        **kwargs: passed on to `dataclasses.field`.
    """
    attached = dict(metadata or {})
    if aliases is not None:
        attached["aliases"] = aliases
    if help is not None:
        attached["help"] = help
    return dataclasses.field(metadata=attached, default=default, default_factory=default_factory, **kwargs)
