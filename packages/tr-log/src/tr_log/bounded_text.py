"""Read configuration files and options of limited size, JSON and YAML of limited depth and expansion."""

from __future__ import annotations

import json
import math
import os
import re
import select
import stat
import time
from pathlib import Path
from typing import Any

from tr_log.formatting import printable

MOST_BYTES = 16 << 20
MOST_YAML_BYTES = 1 << 20  # PyYAML reads half a megabyte a second
MOST_LEVELS = 64  # mappings and lists within each other; the deepest real configurations have six or so
MOST_DIGITS = 400  # more than any float has; Python itself refuses to write 4,300
# Without aliases YAML has at most one element for each of its characters. It may have this many more.
SPARE_ELEMENTS = 100_000
MOST_OPTION_CHARACTERS = 10_000
PIPE_PATIENCE_S = 300.0  # the program behind a pipe may ask for a password first

_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
# The end of the text also ends a string. Otherwise each quote in an unclosed string would start a new search.
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)|([\[{])|([\]}])', re.DOTALL)


class ContentError(ValueError):
    """A file or text cannot be used; the message says why and starts with a verb."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, lines=True))


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Read a text file or a pipe, without its byte order mark.

    Args:
        path: a regular file, a pipe such as a shell's `<(...)` makes, or the null device, which is empty; `~` is the
            home folder.
        most_bytes: a larger file is refused, and never held in memory.

    Raises:
        ContentError: it is something else, is too large, is not UTF-8, or cannot be read.
    """
    try:
        content = _bytes_of(Path(path).expanduser(), most_bytes)
    except FileNotFoundError:
        raise ContentError("does not exist") from None
    except OSError as error:
        raise ContentError(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RuntimeError) as error:  # a NUL in the path; the home of an unknown user
        if isinstance(error, ContentError):
            raise
        raise ContentError(f"cannot be read: {error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ContentError(f"is not UTF-8 text: line {line} has the byte 0x{content[error.start]:02x}") from None


def load_json(text: str) -> Any:
    """Parse JSON text.

    Raises:
        ContentError: it is not JSON, is nested too deeply, has a key twice or a number that no float holds.
    """
    _check_levels(text)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_whole_number, parse_float=number)
    except json.JSONDecodeError as error:
        raise ContentError(f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error


def parse_options(text: str) -> dict[str, Any]:
    """Return options by name from JSON, or from `name=value` parts separated by commas.

    A value may hold commas within quotes or brackets. Numbers, `true`, `false`, `none` and bracketed lists are
    converted; quoted text stays text.

    Raises:
        ContentError: the text cannot be read; says which part, and what it needs.
    """
    if len(text) > MOST_OPTION_CHARACTERS:
        raise ContentError(f"needs at most {MOST_OPTION_CHARACTERS:,} characters; it has {len(text):,}")
    if text.lstrip().startswith("{"):
        return _options_from_json(text)
    options: dict[str, Any] = {}
    for part in _split(text):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise ContentError(f"needs name=value parts separated by commas, not {part.strip()!r}")
        if name in options:
            raise ContentError(f"needs each name once; {name} is there twice")
        options[name] = _literal(value.strip())
    return options


def _options_from_json(text: str) -> dict[str, Any]:
    try:
        return dict(load_json(text))
    except ContentError as error:
        at = (
            f"breaks off at character {error.__cause__.pos + 1}"
            if isinstance(error.__cause__, json.JSONDecodeError)
            else error
        )
        raise ContentError(f"needs name=value parts or JSON; as JSON it {at}") from None


def _split(text: str) -> list[str]:
    """Split at the commas that lie outside quotes and brackets."""
    parts, start, closers, quote = [], 0, [], ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _CLOSING:
            closers.append(_CLOSING[character])
            if len(closers) > MOST_LEVELS:
                raise ContentError(f"needs at most {MOST_LEVELS} brackets within each other")
        elif closers and character == closers[-1]:
            closers.pop()
        elif character == "," and not closers:
            parts.append(text[start:position])
            start = position + 1
    if quote or closers:
        raise ContentError(f"needs the closing {quote or closers[-1]} of a value")
    return [part for part in (*parts, text[start:]) if part.strip()]


def _literal(text: str) -> Any:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[:1] in ("[", "(") and text[-1:] in ("]", ")"):
        return [_literal(part.strip()) for part in _split(text[1:-1])]
    for kind in (int, number):
        try:
            return kind(text)
        except ContentError as error:
            raise ContentError(f"needs numbers; it {error}") from None
        except ValueError:
            continue
    return text


def number(text: str) -> float:
    """Parse a float.

    Raises:
        ContentError: it has too many digits, or a float would silently become infinite or 0.
    """
    check_digits(text)
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ContentError(f"has the number {text}, which is too large; the largest is about 1.8e308")
    if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
        raise ContentError(f"has the number {text}, which is too small; the smallest is about 4.9e-324")
    return value


def check_digits(text: str) -> None:
    """Refuse a number with too many digits.

    Raises:
        ContentError: it has more than `MOST_DIGITS` characters.
    """
    if len(text) > MOST_DIGITS:
        raise ContentError(f"has a number of {len(text):,} characters, {text[:20]}...; at most {MOST_DIGITS} are taken")


def check_depth(content: Any) -> None:
    """Refuse mappings and lists that are nested too deeply. No object may be in `content` twice.

    Raises:
        ContentError: there are more than `MOST_LEVELS` levels.
    """
    level, depth = [content], 0
    while level:
        if depth > MOST_LEVELS:
            raise ContentError(f"is nested more than {MOST_LEVELS} levels deep")
        level = [inner for outer in level for inner in _within(outer)]
        depth += 1


def _within(outer: Any) -> Any:
    if isinstance(outer, dict):
        return outer.values()
    return outer if isinstance(outer, list) else ()


def _bytes_of(path: Path, most_bytes: int) -> bytes:
    kind = os.stat(path)
    if stat.S_ISCHR(kind.st_mode) and kind.st_rdev == os.stat(os.devnull).st_rdev:
        return b""
    if stat.S_ISDIR(kind.st_mode):
        raise ContentError("is a folder; give a file in it")
    if not (stat.S_ISREG(kind.st_mode) or stat.S_ISFIFO(kind.st_mode)):
        raise ContentError("is a device or a socket; give a file")
    # A blocking open would wait for a writer of the pipe, which may never come.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        return _until_the_end(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _until_the_end(descriptor: int, most_bytes: int) -> bytes:
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    deadline = time.monotonic() + PIPE_PATIENCE_S
    content = bytearray()
    while True:
        if is_pipe and not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ContentError(f"is a pipe to whose end nothing came within {PIPE_PATIENCE_S:g} s")
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return bytes(content)
        content += chunk
        if len(content) > most_bytes:
            raise ContentError(f"holds more than {most_bytes:,} bytes, which no configuration needs")


def _check_levels(text: str) -> None:
    """Check the depth of the brackets before a recursive parser reads them."""
    if text.count("[") + text.count("{") <= MOST_LEVELS:
        return
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += bool(match[1]) - bool(match[2])
        if depth > MOST_LEVELS:
            line = text.count("\n", 0, match.start()) + 1
            raise ContentError(f"is nested more than {MOST_LEVELS} levels deep, on line {line}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ContentError(f"has the key {key[:100]} twice; keep one")
        mapping[key] = value
    return mapping


def _whole_number(text: str) -> int:
    check_digits(text)
    return int(text)


class BoundedYaml:
    """Limit the documents of a PyYAML loader: a base class to put before it.

    Deep nesting is refused while it is read: the loader recurses for each level, and looks at all levels for each
    token. Aliases and merges count as often as they repeat their content, because a copy or a print of the result
    repeats it too. They are counted before any value is built. A mapping with the same key twice is refused.

    Attributes:
        tags: the allowed kinds of values, by the end of their tags.
    """

    tags = frozenset({"null", "bool", "int", "float", "str", "seq", "map", "merge"})

    def __init__(self, stream: str) -> None:
        super().__init__(stream)  # pyright: ignore[reportCallIssue] - the loader's
        self._most_elements = len(stream) + SPARE_ELEMENTS
        self._composing = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        """Refuse brackets within too many brackets."""
        if self.flow_level >= MOST_LEVELS:  # pyright: ignore[reportAttributeAccessIssue]
            raise _too_deep(self.line)  # pyright: ignore[reportAttributeAccessIssue]
        super().fetch_flow_collection_start(token)  # pyright: ignore[reportAttributeAccessIssue]

    def add_indent(self, column: int) -> bool:
        """Refuse lines that are indented too often."""
        if self.indent < column and len(self.indents) >= MOST_LEVELS:  # pyright: ignore[reportAttributeAccessIssue]
            raise _too_deep(self.line)  # pyright: ignore[reportAttributeAccessIssue]
        return super().add_indent(column)  # pyright: ignore[reportAttributeAccessIssue]

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse a node that is nested too deeply, in either notation."""
        if self._composing > MOST_LEVELS:
            raise _too_deep(self.line)  # pyright: ignore[reportAttributeAccessIssue]
        self._composing += 1
        try:
            return super().compose_node(parent, index)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            self._composing -= 1

    def get_single_node(self) -> Any:
        """Return the document's node, after checking its depth and its expanded size."""
        node = super().get_single_node()  # pyright: ignore[reportAttributeAccessIssue]
        if node is not None:
            self._measure(node)
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Replace `<<` by the pairs that it names: a mapping's own win, then those that are named first.

        PyYAML 6.0.4 tells keys apart by the identity of their text, and so lets others win.
        """
        own = [pair for pair in node.value if pair[0].tag != f"{_TAG}merge"]
        for key, _ in own:
            if key.tag == f"{_TAG}value":
                key.tag = f"{_TAG}str"
        merged: dict[Any, tuple[Any, Any]] = {}
        for mapping in (one for key, value in node.value if key.tag == f"{_TAG}merge" for one in _mappings(value)):
            self.flatten_mapping(mapping)
            merged = {_key(pair[0]): pair for pair in mapping.value} | merged
        node.value = list((merged | {_key(pair[0]): pair for pair in own}).values())

    def _measure(self, root: Any) -> None:
        """Check depth and expanded size. Visits each node once, however many aliases refer to it."""
        sizes: dict[int, tuple[int, int]] = {}  # elements and levels
        above: set[int] = set()
        waiting = [(root, False)]
        while waiting:
            node, is_measured = waiting.pop()
            if is_measured:
                above.discard(id(node))
                sizes[id(node)] = self._size(node, [sizes[id(child)] for child in _children(node)])
            elif id(node) in above:
                raise ContentError(f"has an alias on line {_line(node)} that lies within what it stands for")
            elif id(node) not in sizes:
                self._check(node)
                above.add(id(node))
                waiting.append((node, True))
                waiting += [(child, False) for child in _children(node)]

    def _size(self, node: Any, parts: list[tuple[int, int]]) -> tuple[int, int]:
        elements = 1 + sum(elements for elements, _ in parts)
        levels = 1 + max((levels for _, levels in parts), default=-1)
        if elements > self._most_elements:
            raise ContentError(
                f"has aliases that repeat what it holds until there are more than {self._most_elements:,} elements, "
                f"on line {_line(node)}; write out what is meant"
            )
        if levels > MOST_LEVELS:
            raise _too_deep(_line(node) - 1)
        return elements, levels

    def _check(self, node: Any) -> None:
        if node.tag.removeprefix(_TAG) not in self.tags:
            tag = f"!!{node.tag.removeprefix(_TAG)}" if node.tag.startswith(_TAG) else node.tag
            raise ContentError(f"has the tag {tag[:100]} on line {_line(node)}; only plain values can be given")
        if node.id == "mapping":
            _check_keys(node)
        if node.id == "scalar" and node.tag in _NUMBERS and len(node.value) > MOST_DIGITS:
            start = f"{len(node.value):,} characters, {node.value[:20]}..., on line {_line(node)}"
            raise ContentError(f"has a number of {start}; at most {MOST_DIGITS} are taken")


def _check_keys(node: Any) -> None:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = _key(key_node)
        if key in seen:
            shown = key_node.value if key_node.id == "scalar" else "that is a collection"
            raise ContentError(f"has the key {shown} twice (again on line {_line(key_node)}); keep one")
        seen.add(key)


def _key(node: Any) -> Any:
    return (node.tag, node.value) if node.id == "scalar" else id(node)


def _mappings(node: Any) -> list[Any]:
    """Return what `<<` names: a mapping, or each of a list of mappings."""
    named = node.value if node.id == "sequence" else [node]
    for each in named:
        if each.id != "mapping":
            raise ContentError(
                f"merges what is not a mapping, on line {_line(each)}; `<<` takes a mapping or a list of them"
            )
    return named


def _children(node: Any) -> list[Any]:
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    return node.value if node.id == "sequence" else []


def _line(node: Any) -> int:
    return node.start_mark.line + 1


def _too_deep(line: int) -> ContentError:
    return ContentError(f"is nested more than {MOST_LEVELS} levels deep, on line {line + 1}")
