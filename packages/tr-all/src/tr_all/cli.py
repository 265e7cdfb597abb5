"""Run `trainer`: one command whose subcommands come from the installed packages."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path

from tr_log.streams import usable_streams, write_text

GROUP = "tr.commands"
USAGE_ERROR = 2
READER_GONE = 128 + 13  # SIGPIPE, as in a shell

_USAGE = "usage: trainer COMMAND [ARGUMENT ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first word names, with the words after it.

    A subcommand is an entry point of the group `tr.commands`: a function that takes the list of words and returns the
    exit code.

    Args:
        argv: the words after `trainer`; None takes this program's.

    Returns:
        The exit code: the subcommand's, or 2 if the subcommand does not exist, or 1 if it cannot be loaded; 141 if
        the reader of the output has ended, as after SIGPIPE, and 1 if the output cannot be written.
    """
    with usable_streams():
        _escape_what_stdout_cannot_hold()
        try:
            try:
                code = _run(list(sys.argv[1:] if argv is None else argv))
            except SystemExit:  # from --help, after printing
                sys.stdout.flush()
                raise
            sys.stdout.flush()
            return code
        except OSError as error:
            if not _stdout_is_lost():
                raise
            return _leave_quietly(error)


def _run(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"], ["help"]):
        print(_help())
        return 0
    if words[:1] == ["--version"]:
        words[0] = "version"
    if not words:
        return _refuse(f"a command is missing\n\n{_help()}")
    name, *rest = words
    offers = commands().get(name, [])
    if not offers:
        return _refuse(_unknown(name))
    if len({offer.value for offer in offers}) > 1:
        claims = " and ".join(f"{_origin(offer)} ({offer.value})" for offer in offers)
        return _refuse(f"command {name!r} is offered by {claims}; uninstall one of them")
    try:
        command = offers[0].load()
    except (ImportError, AttributeError) as error:
        print(f"trainer: command {name!r} of {_origin(offers[0])} cannot be loaded: {error}", file=sys.stderr)
        return 1
    return command(rest) or 0


def _escape_what_stdout_cannot_hold() -> None:
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _stdout_is_lost() -> bool:
    """Return whether printing is no longer possible, to separate that error from others."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _leave_quietly(error: OSError) -> int:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # otherwise the interpreter would flush again, and report the failure
    os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    write_text(sys.stderr, f"trainer: the output cannot be written: {error.strerror}\n")
    return 1


def commands() -> dict[str, list[EntryPoint]]:
    """Return the installed subcommands by name, sorted, each with all its providers. Nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        found.setdefault(entry.name, []).append(entry)
    return found


def _help() -> str:
    known = commands()
    width = max(map(len, known), default=0)
    lines = [f"  {name:<{width}}  {summary(offers[0].module)}".rstrip() for name, offers in known.items()]
    return "\n".join(
        [_USAGE, "", "commands:", *lines, "", "'trainer COMMAND --help' explains a command's own arguments."]
    )


def _unknown(name: str) -> str:
    known = list(commands())
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? There are" if close else "there are"
    return f"unknown command {name!r}; {hint}: {', '.join(known)}"


def _refuse(message: str) -> int:
    print(f"trainer: {message}", file=sys.stderr)
    return USAGE_ERROR


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def summary(module: str) -> str:
    """Return the first line of a module's docstring, read from its source; empty if there is none.

    Neither the module nor its parent packages are imported: that may take seconds.

    Args:
        module: dotted name.
    """
    path = _source(module)
    if path is None:
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return docstring.partition("\n")[0].rstrip(".")


def _source(module: str) -> Path | None:
    top, *inner = module.split(".")
    spec = find_spec(top)  # for a top-level name only: for a dotted one it imports the parents
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*inner)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
