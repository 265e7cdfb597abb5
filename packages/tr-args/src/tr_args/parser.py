"""Parse command lines, files and environment variables into dataclasses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from tr_args.checked import Checked, Given, build, generated_init, resolve
from tr_args.errors import MOST_GUESSED, NOTHING, ArgumentsError, Problem, cut
from tr_args.files import Sources, read_mapping, read_words
from tr_args.flags import CommandLine, FlagTable
from tr_args.help_page import add_sections
from tr_args.schema import schema

COMMAND_LINE = "command line"
MOST_LEFT = 2_000  # flags that belong to no dataclass


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose flags are the fields of dataclasses.

    Values come from the dataclasses' defaults, `set_defaults`, configuration files (`--config`), environment variables
    (with `env_prefix`), `.args` files and the command line; later ones win. Flags must be written in full, with `_` or
    `-`, as `--name value` or `--name=value`. Lists take several words, mappings take JSON. Switches take `--flag`,
    `--flag false` and `--no-flag`.

    `add_argument` adds further arguments; they are returned as a namespace.

    Attributes:
        origins: after parsing, the source of each given field's value.
    """

    def __init__(
        self,
        dataclass_types: type | Iterable[type] | None = None,
        *,
        config_flag: str = "--config",
        env_prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Build the flags.

        Args:
            dataclass_types: one dataclass or several.
            config_flag: flag that names a configuration file; not used if a dataclass has a field of that
                name.
            env_prefix: prefix of environment variables, before a field's name in capitals; None reads none.
            **kwargs: passed on to `argparse.ArgumentParser`, but for `allow_abbrev`.

        Raises:
            ValueError: two dataclasses have a field of the same name, or a field's metadata has a setting that a field
                cannot have.
        """
        types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        self._table = FlagTable(types)
        self._config_flag = None if self._table.flag(config_flag) else config_flag
        self._env_prefix = env_prefix
        self.origins: dict[str, str] = {}
        kwargs.setdefault("formatter_class", _formatter)
        super().__init__(**{**kwargs, "allow_abbrev": False})
        self._field_actions = self._table.actions()
        self._actions += self._field_actions
        if self._config_flag:
            text = "YAML, TOML or JSON file with values by name; flags go before it. Can be repeated."
            shown = argparse.Action([self._config_flag], "config", default=argparse.SUPPRESS, metavar="FILE", help=text)
            self._optionals._group_actions.append(shown)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an argument by hand, as `argparse` does.

        Raises:
            ValueError: a dataclass has a field of that name.
        """
        for flag in args:
            if isinstance(flag, str) and (match := self._table.flag(flag)):
                raise ValueError(f"{flag} is a field of {match[0].cls.__name__}; choose another name")
        return super().add_argument(*args, **kwargs)

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | os.PathLike[str] | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parse a command line.

        Args:
            args: its words; None takes this program's.
            return_remaining_strings: return words that no flag takes, instead of refusing them.
            look_for_args_file: without `args`, also read `SCRIPT.args` beside the script, if it exists.
            args_filename: file of further arguments; the command line overrides them.
            args_file_flag: flag that names such a file; it can be repeated.

        Returns:
            One object for each dataclass, in order; then a namespace, if arguments were added by hand; then
            the list of remaining words, if requested.

        Raises:
            ArgumentsError: with every problem. For this program's own command line (`args` is None) it is written to
                stderr instead, and the program ends with code 2.
        """
        try:
            files = self._args_files(args, look_for_args_file, args_filename)
            sources, extra, rest = self._read(args, files, args_file_flag, refuse_rest=not return_remaining_strings)
            objects = self._build(sources)
        except ArgumentsError as error:
            if args is not None:
                raise
            self.exit(2, f"{self.prog}: error: {error}\nTry {self.prog} --help\n")
        outputs = (*objects, extra) if vars(extra) else tuple(objects)
        return (*outputs, rest) if return_remaining_strings else outputs

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - one for all overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return one namespace with the values of all fields and arguments, and the words that no flag takes.

        Values are those that the dataclasses' constructors are given, choices by their values; training arguments are
        as they are once they are built. `parse_args` uses it too. Ends the program with code 2 if a value cannot be
        used, as argparse does.
        """
        try:
            sources, extra, rest = self._read(args, [], None, refuse_rest=False)
            values = self._values(sources)
        except ArgumentsError as error:
            self.error(str(error))
        namespace = namespace or argparse.Namespace()
        for name, value in {**values, **vars(extra)}.items():
            setattr(namespace, name, value)
        return namespace, rest

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return one object for each dataclass from values by name.

        Args:
            args: the values.
            allow_extra_keys: ignore unknown names instead of refusing them.

        Raises:
            ArgumentsError: with every problem.
        """
        return self._from_mapping(args, "call", allow_extra_keys)

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return one object for each dataclass from a JSON file; see `parse_dict`."""
        return self._from_mapping(read_mapping(json_file, "json"), f"file {json_file}", allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return one object for each dataclass from a YAML file; see `parse_dict`."""
        return self._from_mapping(read_mapping(yaml_file, "yaml"), f"file {yaml_file}", allow_extra_keys)

    def parse_toml_file(self, toml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return one object for each dataclass from a TOML file; see `parse_dict`."""
        return self._from_mapping(read_mapping(toml_file, "toml"), f"file {toml_file}", allow_extra_keys)

    def format_usage(self) -> str:
        """Return the line of usage, with the arguments added by hand."""
        with self._by_hand():
            return super().format_usage()

    def format_help(self) -> str:
        """Return the help page: usage, then arguments added by hand, then the flags by topic."""
        own = self.format_usage().removeprefix("usage: ").strip()
        config = f"[{self._config_flag} FILE] " if self._config_flag else ""
        before = self.usage, self._action_groups
        self.usage = f"{own} {config}[--NAME VALUE ...]".replace("%", "%%")
        self._action_groups = list(self._action_groups)
        try:
            add_sections(self, self._table)
            return super().format_help()
        finally:
            self.usage, self._action_groups = before

    def _from_mapping(self, values: Mapping[str, Any], origin: str, allow_extra: bool) -> tuple[Any, ...]:
        sources = Sources(self._table)
        sources.add(values, origin, allow_extra=allow_extra)
        return tuple(self._build(sources))

    def _read(
        self,
        args: Sequence[str] | None,
        args_files: list[Path],
        args_file_flag: str | None,
        *,
        refuse_rest: bool,
    ) -> tuple[Sources, argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if args_file_flag:
            named, words = _take_named_files(words, args_file_flag)
            args_files = [*args_files, *named]
        lines = [(read_words(path), f"file {path}") for path in args_files] + [(words, COMMAND_LINE)]
        settings: dict[str, Any] = {"config_flag": self._config_flag, "foreign": self._option_string_actions.keys()}
        given = [CommandLine(line, self._table, origin=origin, **settings) for line, origin in lines]
        extra, rest = self._parse_by_hand([word for line in given for word in line.rest])
        sources = Sources(self._table)
        sources.add(self._table.changed_defaults(), "set_defaults")
        for path in (path for line in given for path in line.config_files):
            try:
                sources.add(read_mapping(path), f"file {path}")
            except ArgumentsError as error:
                sources.problems += error.problems
        if self._env_prefix is not None:
            sources.add_environment(self._env_prefix)
        for line in given:
            sources.add(line.values, line.origin)
            sources.problems += line.problems
        sources.problems += self._not_given(sources)
        if refuse_rest:
            sources.problems += self._refused(rest, {word: line.origin for line in given for word in line.rest})
        layers = sources.given.values()
        self.origins = {name: item.origin for layer in layers for name, item in layer.items()}
        return sources, extra, rest

    def _not_given(self, sources: Sources) -> Iterator[Problem]:
        """Yield the fields whose metadata says that they are required, though they have a default."""
        for cls, given in sources.given.items():
            for name, spec in schema(cls).items():
                if spec.must_be_given and not spec.required and name not in given:
                    yield Problem(name, NOTHING, f"{name} is missing; its metadata says required=True")

    def _parse_by_hand(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments that were added by hand, and `--help`."""
        unknown = [word for word in words if word.startswith("-")]
        if len(unknown) > MOST_LEFT:  # argparse takes quadratic time in their number
            message = f"{len(unknown):,} flags are none of the arguments', from {cut(unknown[0])} on"
            raise ArgumentsError(
                [Problem("", NOTHING, f"{message}; at most {MOST_LEFT:,} are looked at", COMMAND_LINE)]
            )
        with self._by_hand():
            return super().parse_known_args(words)

    @contextmanager
    def _by_hand(self) -> Iterator[None]:
        """Let argparse see only the arguments added by hand, and their defaults."""
        every, defaults = self._actions, self._defaults
        fields = set(map(id, self._field_actions))
        self._actions = [action for action in every if id(action) not in fields]
        self._defaults = {name: value for name, value in defaults.items() if self._table.named(name) is None}
        try:
            yield
        finally:
            self._actions, self._defaults = every, defaults

    def _refused(self, rest: list[str], origins: dict[str, str]) -> Iterable[Problem]:
        after_flag, guessed = False, 0
        for word in rest:
            origin = origins.get(word, COMMAND_LINE)
            if word.startswith("-") and word != "--":
                after_flag = True
                flag = word.partition("=")[0]
                guessed += 1
                text = self._table.unknown(flag) if guessed <= MOST_GUESSED else f"unknown argument {flag}"
                yield Problem(flag, NOTHING, text, origin, is_unknown=True)
            elif not after_flag:
                message = f"unexpected {word!r}; values follow a flag, as in --name {word}"
                yield Problem("", NOTHING, message, origin)

    def _build(self, sources: Sources) -> list[Any]:
        problems, objects = sources.problems, []
        for cls, given in sources.given.items():
            try:
                objects.append(_construct(cls, given))
            except ArgumentsError as error:
                problems += error.problems
        if problems:
            raise ArgumentsError(problems)
        return objects

    def _values(self, sources: Sources) -> dict[str, Any]:
        """Return the values of all fields by name."""
        values: dict[str, Any] = {}
        for cls, given in sources.given.items():
            try:
                values |= _values_of(cls, given)
            except ArgumentsError as error:
                sources.problems += error.problems
        if sources.problems:
            raise ArgumentsError(sources.problems)
        return values

    @staticmethod
    def _args_files(args: Sequence[str] | None, beside_script: bool, name: str | os.PathLike[str] | None) -> list[Path]:
        if name is not None:
            return [Path(name)]
        if args is None and beside_script and sys.argv and sys.argv[0]:
            path = Path(sys.argv[0]).with_suffix(".args")
            return [path] if path.is_file() else []
        return []


def _with_switches(cls: type, given: dict[str, Given]) -> dict[str, Given]:
    """Add False for each switch without a default: a command line can only switch it on."""
    switches = (name for name, spec in schema(cls).items() if spec.is_bare_switch and name not in given)
    return {**given, **{name: Given(False, "default") for name in switches}}


def _construct(cls: type, given: dict[str, Given]) -> Any:
    given = _with_switches(cls, given)
    if issubclass(cls, Checked) and generated_init(cls):
        return build(cls, given)
    problems: list[Problem] = []
    resolved = resolve(cls, given, problems)
    if problems:
        raise ArgumentsError(problems)
    try:
        return cls(**resolved.values)
    except ValueError as error:
        if isinstance(error, ArgumentsError):
            raise
        raise ArgumentsError([Problem("", NOTHING, f"{cls.__name__}: {error}")]) from error


def _values_of(cls: type, given: dict[str, Given]) -> dict[str, Any]:
    """Return the values of a dataclass's fields by name."""
    if issubclass(cls, Checked):
        return {name: value for name, value in vars(_construct(cls, given)).items() if not name.startswith("_")}
    problems: list[Problem] = []
    values = resolve(cls, _with_switches(cls, given), problems).values
    if problems:
        raise ArgumentsError(problems)
    unset = {name: spec for name, spec in schema(cls).items() if name not in values}
    values = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    return {**values, **{name: spec.make_default() for name, spec in unset.items()}}


def _take_named_files(words: list[str], flag: str) -> tuple[list[Path], list[str]]:
    """Take `FLAG FILE` and `FLAG=FILE` out of the words."""
    files, rest, position = [], [], 0
    while position < len(words):
        word = words[position]
        if word.startswith(f"{flag}="):
            files.append(Path(word.removeprefix(f"{flag}=")))
        elif word == flag:
            position += 1
            if position == len(words):
                raise ArgumentsError([Problem(flag, NOTHING, f"{flag} needs the path of a file", COMMAND_LINE)])
            files.append(Path(words[position]))
        else:
            rest.append(word)
        position += 1
    return files, rest


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=32)


HfArgumentParser = ArgumentParser
"""The name that scripts for other trainers import."""
