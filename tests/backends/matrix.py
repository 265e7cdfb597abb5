"""A plugin of pytest that writes what ran on a backend and what did not: `-p matrix --matrix FILE --column NAME`.

FILE is a page in Markdown with a column for each backend, of the day and machine that it was run on; a session replaces
its own column, and leaves the others as it reads them there. A test's row is what its mark says, `row("resume")`, or
its own name. Without `--matrix` nothing is written; the counts are printed.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from machine import about
from requirements import BACKENDS as COLUMNS

# What each backend is to do. The optimizers are those that the registry lists.
SCENARIOS = {
    "promises": "the strategy keeps its promises to the loop",
    "numbers": "losses and weights are those of one process, accumulated or not",
    "short": "a last batch with fewer rows than ranks",
    "once": "every row is used once an epoch",
    "bf16": "bfloat16",
    "overflow": "an update that is not finite is skipped",
    "recompute": "activations are computed again",
    "average": "an average of the weights (EMA)",
    "generation": "generation in evaluations",
    "adapter": "a LoRA adapter of PEFT is trained, saved and resumed",
    "export": "the model is saved whole, for any program",
    "resume": "a killed run resumes bit for bit",
    "resize": "a run goes on with another number of processes",
    "other strategy": "a run goes on with another strategy",
    "own loop": "a loop written by hand, with four lines changed",
    "refused": "what cannot be trained so is refused in words",
}
OPTIM = "optim "
# Cells for which there can be no test.
IMPOSSIBLE = {
    ("resize", "xla"): "PJRT's CPU carries nothing between processes",
}
KINDS = ("failed", "passed", "refused", "not run", "impossible")
LIBRARIES = (
    "torch", "torch_xla", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "torchao", "schedulefree",
    "torch-optimi", "grokadamw", "galore-torch", "lomo-optim",
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--matrix", type=Path, help="write what ran as a column of this page")
    parser.addoption("--column", choices=COLUMNS, help="the backend that is run")
    parser.addoption("--matrix-adds", action="store_true", help="keep the column's rows that are not run now")


def pytest_configure(config):
    for mark in ("row(name): the row of the matrix", "column(*names): the backends"):  # here and in pyproject.toml
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(Recorder(config), "matrix-recorder")


def row_of(item):
    """Return the row of a test: that of its mark, or its name in words."""
    mark = item.get_closest_marker("row")
    if mark is None:
        return item.function.__name__.removeprefix("test_").replace("_", " ")
    [row] = mark.args
    if row not in SCENARIOS and not row.startswith(OPTIM):
        raise pytest.UsageError(f"{item.nodeid}: row({row!r}) is none of {list(SCENARIOS)}")
    return row


class Recorder:
    """Collects what became of each test, of all workers."""

    def __init__(self, config):
        self.config, self.rows, self.reasons = config, {}, {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            variant = getattr(item, "callspec", None) and item.callspec.params.get("variant", "")
            item.user_properties += [("row", row_of(item)), ("variant", variant or "")]

    def pytest_runtest_logreport(self, report):
        known = dict(report.user_properties)
        if (found := outcome(report, known)) is None or "row" not in known:
            return
        kind, why = found
        note(self.rows, known["row"], kind, why, known["variant"])
        if kind in ("not run", "impossible"):
            self.reasons.setdefault(f"{kind}: {why}", []).append(report.nodeid.rpartition("::")[2])

    def pytest_terminal_summary(self, terminalreporter):
        ran = sum(len(terminalreporter.getreports(name)) for name in ("passed", "failed"))
        terminalreporter.section("what ran here")
        terminalreporter.write_line(f"ran here: {ran}; not run: {sum(map(len, self.reasons.values()))}")
        for reason, names in sorted(self.reasons.items()):
            terminalreporter.write_line(f"{reason}: {len(names)}")
            for name in names:
                terminalreporter.write_line(f"    {name}")

    def pytest_sessionfinish(self, session, exitstatus):
        options = session.config.option
        if options.matrix is None or hasattr(session.config, "workerinput") or exitstatus not in (0, 1):
            return
        update(options.matrix, options.column, self.rows, adds=options.matrix_adds)


def outcome(report, known):
    """Return a kind and a reason for a report that decides about its test, or None."""
    if report.failed:
        return "failed", report.nodeid.rpartition("::")[2]
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "?")
        reason = reason.removeprefix("Skipped: ")
        impossible = reason.startswith("impossible: ")
        return ("impossible" if impossible else "not run"), reason.removeprefix("impossible: ")
    if report.when != "call":
        return None
    return ("refused", known["refused"]) if "refused" in known else ("passed", "")


def note(rows, row, kind, why, variant):
    """Count a test: rows by name, kind, reason and variant."""
    counts = rows.setdefault(row, {}).setdefault(kind, {}).setdefault(why, {})
    counts[variant] = counts.get(variant, 0) + 1


@dataclass
class Column:
    """What the page has of a backend: where it ran, a text for each row, and the reasons that these give by number."""

    about: dict = field(default_factory=dict)
    cells: dict = field(default_factory=dict)
    reasons: list = field(default_factory=list)

    def number(self, text):
        text = " ".join(text.split())  # the page has a line for it
        if text not in self.reasons:
            self.reasons.append(text)
        return self.reasons.index(text) + 1


def update(path, name, rows, *, adds=False):
    """Write a column into the page; the others stay as they are."""
    columns = read(path.read_text()) if path.exists() else {}
    column = columns[name] = columns.get(name, Column()) if adds else Column()
    found = about(LIBRARIES)
    libraries = ", ".join(f"{library} {version}" for library, version in found["versions"].items())
    column.about = {
        "day": found["date"],
        "machine": found["machine"],
        "Python": found["python"],
        "libraries": libraries,
    }
    column.cells |= {label(row): cell(kinds, column) for row, kinds in rows.items()}
    path.write_text(page(columns))


def label(row):
    """Return the words of the page for a row."""
    return SCENARIOS.get(row) or (f"`{row.removeprefix(OPTIM)}`" if row.startswith(OPTIM) else row)


def cell(found, column):
    """Return what a cell says: every kind of outcome of its tests."""
    words = []
    for kind in (kind for kind in KINDS if kind in found):
        if kind == "passed":
            words.append(kind)
        elif kind == "failed":
            cases = (name.partition("[")[2].removesuffix("]") or name for name in found[kind])
            words.append(f"**failed** ({', '.join(sorted(cases))})")
        else:
            partial = len(found) > 1
            numbers = {column.number(reason(why, variants, partial)) for why, variants in sorted(found[kind].items())}
            words.append(f"{kind} ({', '.join(map(str, sorted(numbers)))})")
    return ", ".join(words)


def reason(why, variants, partial):
    """Return a reason, with the variants that it is of where others passed."""
    named = sorted(name for name in variants if name) if partial else []
    return f"with {', '.join(named)}: {why}" if named else why


def result(text):
    """Return the one word that the counts of a column take a cell for."""
    return next(kind for kind in (*KINDS, "no test") if kind in text)


def read(text):
    """Return the columns of a page."""
    columns, head, of = {}, [], None
    for line in text.splitlines():
        words = [word.strip() for word in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if opened := re.match("<summary>(.*?):", line):
            of = columns.get(opened[1])
        elif of and (about := re.match(f"- ({'|'.join(ABOUT)}): (.*)", line)):
            of.about[about[1]] = about[2]
        elif of and (numbered := re.match(r"\d+\. (.*)", line)):
            of.reasons.append(numbered[1])
        elif not words or words[0] == "---":
            head = head if words else []
        elif not head:
            head = words
        elif head[0] == "backend":
            columns[words[0]] = Column({"day": words[1]})
        elif head[0] == "test":
            of.cells[words[0]] = words[1]
        else:
            for name, word in zip(head[1:], words[1:], strict=True):
                columns[name].cells[words[0]] = word
    return columns


def table(head, lines):
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]


def folded(title, lines):
    """Return what a reader opens by its title; a page shows the rest without it."""
    return ["", "<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def page(columns):
    """Return the page in Markdown."""
    from tr_core.testing import optimizer_names

    columns = {name: columns[name] for name in COLUMNS if name in columns}
    optimizers = [f"`{name}`" for name in optimizer_names()]
    for (row, name), why in IMPOSSIBLE.items():
        if name in columns and columns[name].cells.get(label(row), "no test") == "no test":
            columns[name].cells[label(row)] = f"impossible ({columns[name].number(why)})"
    rows = {row: [c.cells.get(row, "no test") for c in columns.values()] for row in [*SCENARIOS.values(), *optimizers]}
    own = {name: {row: text for row, text in c.cells.items() if row not in rows} for name, c in columns.items()}
    counted = [Counter(map(result, texts)) for texts in zip(*rows.values(), strict=True)]
    kinds = ("passed", "failed", "refused", "not run", "impossible", "no test")
    lines = [INTRODUCTION]
    lines += table(
        ["backend", "day", *kinds],
        [
            [name, column.about["day"], *(str(n[kind]) for kind in kinds)]
            for (name, column), n in zip(columns.items(), counted, strict=True)
        ],
    )
    if absent := [name for name in COLUMNS if name not in columns]:
        lines += ["", f"Not run as a whole yet, and so without a column: {', '.join(absent)}."]
    lines += ["", "## Scenarios", "", *table(["scenario", *columns], [[row, *rows[row]] for row in SCENARIOS.values()])]
    lines += ["", "## Optimizers", "", OPTIMIZERS]
    told = table(["`optim`", *columns], [[row, *rows[row]] for row in optimizers])
    lines += folded(f"optimizers: {len(optimizers)}", told)
    lines += ["", "## Reasons, and tests of one backend", "", OWN]
    for name, column in columns.items():
        told = [f"- {key}: {column.about[key]}" for key in ABOUT[1:]]
        told += ["", *(f"{number}. {text}" for number, text in enumerate(column.reasons, 1))]
        if rest := [[row, text] for row, text in sorted(own[name].items())]:
            told += ["", *table(["test", "result"], rest)]
        lines += folded(f"{name}: its reasons, tests of its own, machine and libraries", told)
    return "\n".join(lines) + "\n"


ABOUT = ("day", "machine", "Python", "libraries")
INTRODUCTION = """# What runs on which backend

`nox -s "backend(NAME)"` runs the tests of a backend and writes its column here, with the day, the machine and the
versions, before a release; this page is not edited by hand. One row is one or more tests (`tests/backends`), in all
variants of the backend:

- passed: all its tests passed; **failed**: those named did not.
- refused: by design. It ends with one clear message before anything is trained, which is tested.
- not run, impossible: the numbers are those of the backend's [reasons](#reasons-and-tests-of-one-backend).
- no test: nothing in these sessions is about it.

A cell with more than one word says what is true of some variants each.
"""
OPTIMIZERS = """Every name that `--optim` accepts. Passed means: four steps or more changed the weights, on several
processes to those of one; in which variants and how near is in [every optimizer with every
backend](../../tr-dist/docs/optimizers.md)."""
OWN = """The tests have no counterpart on the other backends. Without its device, what passed of `mps` and `cuda` ran on
a substitute that computes on the CPU, or asks only what is chosen and refused."""
