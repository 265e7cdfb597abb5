"""Limit the depth of a YAML document, and the size to which its aliases and merges expand.

`tr_args/bounded_yaml.py` is the same on purpose: neither package imports the other.
"""

from __future__ import annotations

from typing import Any

from tr_dist.bounded_text import MOST_DIGITS, MOST_LEVELS, ContentError

MOST_BYTES = 1 << 20  # PyYAML reads half a megabyte a second
# Without aliases a document has at most one element for each of its characters. It may have this many more.
SPARE_ELEMENTS = 100_000
_TAG = "tag:yaml.org,2002:"
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")


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
        key = (key_node.tag, key_node.value) if key_node.id == "scalar" else id(key_node)
        if key in seen:
            shown = key_node.value if key_node.id == "scalar" else "that is a collection"
            raise ContentError(f"has the key {shown} twice (again on line {_line(key_node)}); keep one")
        seen.add(key)


def _children(node: Any) -> list[Any]:
    if node.id == "mapping":
        return [part for pair in node.value for part in pair]
    return node.value if node.id == "sequence" else []


def _line(node: Any) -> int:
    return node.start_mark.line + 1


def _too_deep(line: int) -> ContentError:
    return ContentError(f"is nested more than {MOST_LEVELS} levels deep, on line {line + 1}")
