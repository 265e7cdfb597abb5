"""Define what is drawn on the page of a run: confusion matrices, and tables such as samples with their predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tr_log.formatting import number, to_scalar

MOST_CLASSES, MOST_ROWS, LONGEST_CELL, MOST_CHARACTERS = 40, 50, 1000, 20_000


class Drawing(ABC):
    """A value of `compute_metrics` or `trainer.log` that is drawn on the page of the run, and is no metric."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return what is drawn, of bounded size: `kind` and what that needs."""


class Table(Drawing):
    """A table for the page of the run, as of samples and what the model said of them.

    The page has the first 50 rows, less if they have more than 20,000 characters; a cell is cut after 1,000.

    Args:
        columns: their titles.
        rows: the cells of each row: text, numbers, and whatever `str` turns into text.

    Raises:
        ValueError: a row has another number of cells than there are columns.
    """

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        self.columns, self.rows = [*map(str, columns)], [list(row) for row in rows]
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"Table(columns, rows) has {len(self.columns)} columns ({', '.join(self.columns)}), but a row has "
                    f"{len(row)} cells: {row!r:.200}; give each row a cell for each column"
                )

    def content(self) -> dict[str, Any]:
        """Return the first rows as text, and how many there are."""
        rows: list[list[str]] = []
        room = MOST_CHARACTERS
        for row in self.rows[:MOST_ROWS]:
            rows.append([_cell(item) for item in row])
            room -= sum(map(len, rows[-1]))
            if room < 0 and len(rows) > 1:
                rows.pop()
                break
        return {
            "kind": "table",
            "columns": [_cell(title) for title in self.columns],
            "rows": rows,
            "of": len(self.rows),
        }


class ConfusionMatrix(Drawing):
    """How often each class was predicted for each, for the page of the run.

    Of more than 40 classes, the page has a table of the pairs that are confused most.

    Args:
        counts: a row for each true class, with a column for each predicted one; lists, an array or a tensor.
        names: of the classes; without them, their numbers.

    Raises:
        ValueError: there are not as many columns as rows, or not as many names.
    """

    def __init__(self, counts: Any, names: Sequence[str] = ()) -> None:
        rows = counts.tolist() if hasattr(counts, "tolist") else [list(row) for row in counts]
        self.counts: list[list[float]] = [[to_scalar(count) for count in row] for row in rows]
        self.names = [*map(str, names or range(len(rows)))]
        widths = sorted({len(row) for row in rows} | {len(self.names)})
        if widths != [len(rows)]:
            raise ValueError(
                f"ConfusionMatrix(counts, names) has {len(rows)} rows, rows of {', '.join(map(str, widths))} columns, "
                f"and {len(self.names)} names; it needs a row, a column and a name for each class"
            )

    @classmethod
    def of(cls, labels: Iterable[Any], predictions: Iterable[Any], names: Sequence[str] = ()) -> ConfusionMatrix:
        """Count pairs of true and predicted classes, each a number from 0.

        Raises:
            ValueError: there are more of one than of the other; a class is negative, as padding is, or has no name.
        """
        pairs = Counter((int(true), int(predicted)) for true, predicted in zip(labels, predictions, strict=True))
        classes = {each for pair in pairs for each in pair}
        size = len(names) or max(classes, default=-1) + 1
        if wrong := [each for each in sorted(classes) if not 0 <= each < size]:
            raise ValueError(
                f"ConfusionMatrix.of(labels, predictions) has the class {wrong[0]}; classes are numbers from 0 to "
                f"{size - 1}: leave out what is not one, such as padding"
            )
        return cls([[pairs[true, predicted] for predicted in range(size)] for true in range(size)], names)

    def content(self) -> dict[str, Any]:
        """Return names and counts; of many classes, a table of the most frequent confusions."""
        if len(self.names) <= MOST_CLASSES:
            return {"kind": "matrix", "names": [_cell(name, 40) for name in self.names], "counts": self.counts}
        wrong = [
            (count, true, predicted)
            for true, row in enumerate(self.counts)
            for predicted, count in enumerate(row)
            if true != predicted and count
        ]
        pairs = [(self.names[true], self.names[other], n) for n, true, other in sorted(wrong, reverse=True)]
        return Table(("true class", "predicted", "times"), pairs).content()


def _cell(item: Any, longest: int = LONGEST_CELL) -> str:
    item = to_scalar(item)
    text = number(item) if isinstance(item, float) else str(item)
    return text if len(text) <= longest else text[: longest - 3] + "..."
