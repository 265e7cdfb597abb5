"""Show a collator only the columns that the model takes; hidden columns stay reachable by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NarrowedSample(dict[str, Any]):
    """A sample that shows only some of its columns.

    Length, iteration, `in`, `get` and copies into a plain dict see only the shown columns. But `sample["text"]`,
    `sample.pop("text")` and `del sample["text"]` reach a hidden one, because naming a column means needing it.
    """

    def __init__(self, sample: Mapping[str, Any], shown: frozenset[str], asked: set[str]) -> None:
        super().__init__({key: value for key, value in sample.items() if key in shown})
        self._hidden = {key: value for key, value in sample.items() if key not in shown}
        self._asked = asked

    def __missing__(self, key: str) -> Any:
        value = self._hidden[key]
        self._asked.add(key)
        return value

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a column, shown or hidden, and return its value."""
        if key in self._hidden and key not in self:
            self._asked.add(key)
            return self._hidden.pop(key)
        return super().pop(key, *default)

    def __delitem__(self, key: str) -> None:
        if key in self:
            super().__delitem__(key)
        else:
            del self._hidden[key]

    def copy(self) -> NarrowedSample:
        """Return a copy that reaches the hidden columns too."""
        return NarrowedSample({**self, **self._hidden}, frozenset(self), self._asked)


def required_columns(collate: Any) -> frozenset[str]:
    """Return the columns in a collator's attribute `required_columns`; none without the attribute.

    Raises:
        TypeError: the attribute is one string instead of several.
    """
    columns = getattr(collate, "required_columns", ())
    if isinstance(columns, str):
        raise TypeError(
            f"required_columns={columns!r} of the data collator must be several names, such as [{columns!r}]"
        )
    return frozenset(columns)
