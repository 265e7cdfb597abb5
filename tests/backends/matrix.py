"""A plugin of pytest that writes what ran on a backend and what did not: `-p matrix --matrix FILE --column NAME`.

FILE holds a column for each backend, of the day and machine that it was run on; the page beside it, of the same name
with `.md`, is written from all of them. A test's row is what its mark says, `row("resume")`, or its own name.
Without `--matrix` nothing is written; the counts are printed.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from machine import about
from requirements import BACKENDS as COLUMNS

# What each backend is to do. The optimizers are those that the registry lists.
SCENARIOS = {
    "promises": "the strategy keeps its promises to the loop",
    "numbers": "losses and weights are those of one process, with and without accumulation",
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
KINDS = ("failed", "passed", "refused", "not run here", "impossible")
LIBRARIES = (
    "torch", "torch_xla", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "torchao", "schedulefree",
    "torch-optimi", "grokadamw", "galore-torch", "lomo-optim",
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--matrix", type=Path, help="write what ran as a column of this file")
    parser.addoption("--column", choices=COLUMNS, help="the backend that is run")
    parser.addoption("--matrix-adds", action="store_true", help="keep the column's rows that are not run now")


def pytest_configure(config):
    add_marks(config)
    config.pluginmanager.register(Recorder(config), "matrix-recorder")


def add_marks(config):
    """Register the marks of tests."""
    config.addinivalue_line("markers", "row(name): the row of the matrix that the test is a part of")
    config.addinivalue_line("markers", "column(*names): the backends that the test is about")


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
        if kind in ("not run here", "impossible"):
            self.reasons.setdefault(f"{kind}: {why}", []).append(report.nodeid.rpartition("::")[2])

    def pytest_terminal_summary(self, terminalreporter):
        ran = sum(len(terminalreporter.getreports(name)) for name in ("passed", "failed"))
        terminalreporter.section("what ran here")
        terminalreporter.write_line(f"ran here: {ran}; not run here: {sum(map(len, self.reasons.values()))}")
        for reason, names in sorted(self.reasons.items()):
            terminalreporter.write_line(f"{reason}: {len(names)}")
            for name in names:
                terminalreporter.write_line(f"    {name}")

    def pytest_sessionfinish(self, session, exitstatus):
        options = session.config.option
        if options.matrix is None or hasattr(session.config, "workerinput") or exitstatus not in (0, 1):
            return
        update(options.matrix, options.column, {**about(LIBRARIES), "rows": self.rows}, adds=options.matrix_adds)


def outcome(report, known):
    """Return a kind and a reason for a report that decides about its test, or None."""
    if report.failed:
        return "failed", report.nodeid.rpartition("::")[2]
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "?")
        reason = reason.removeprefix("Skipped: ")
        impossible = reason.startswith("impossible: ")
        return ("impossible" if impossible else "not run here"), reason.removeprefix("impossible: ")
    if report.when != "call":
        return None
    return ("refused", known["refused"]) if "refused" in known else ("passed", "")


def note(rows, row, kind, why, variant):
    """Count a test: rows by name, kind, reason and variant."""
    counts = rows.setdefault(row, {}).setdefault(kind, {}).setdefault(why, {})
    counts[variant] = counts.get(variant, 0) + 1


def update(path, name, column, *, adds=False):
    """Write a column into the file, and the page from all columns; the other columns stay as they are."""
    from tr_core.testing import optimizer_names

    data = json.loads(path.read_text()) if path.exists() else {"columns": {}}
    before = data["columns"].get(name, {}).get("rows", {}) if adds else {}
    data["columns"][name] = {**column, "rows": {**before, **column["rows"]}}
    data["optimizers"] = optimizer_names()
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    path.with_suffix(".md").write_text(page(data))


class Reasons:
    """Gives each reason the number under which the page has it."""

    def __init__(self):
        self.known = []

    def number(self, text):
        if text not in self.known:
            self.known.append(text)
        return self.known.index(text) + 1


def cell(found, reasons, declared=None):
    """Return what a cell says: every kind of outcome of its tests, or that there are none."""
    if not found:
        return f"impossible ({reasons.number(declared)})" if declared else "no test"
    words = []
    for kind in (kind for kind in KINDS if kind in found):
        if kind == "passed":
            words.append(kind)
        elif kind == "failed":
            cases = (name.partition("[")[2].removesuffix("]") or name for name in found[kind])
            words.append(f"**failed** ({', '.join(sorted(cases))})")
        else:
            partial = len(found) > 1
            numbers = sorted(
                {reasons.number(reason(why, variants, partial)) for why, variants in sorted(found[kind].items())}
            )
            words.append(f"{kind} ({', '.join(map(str, numbers))})")
    return ", ".join(words)


def reason(why, variants, partial):
    """Return a reason, with the variants that it is of where others passed."""
    named = sorted(name for name in variants if name) if partial else []
    return f"with {', '.join(named)}: {why}" if named else why


def result(found, declared=None):
    """Return the one word that the counts of a column take a cell for."""
    if not found:
        return "impossible" if declared else "no test"
    return next(kind for kind in KINDS if kind in found)


def table(head, lines):
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]


def page(data):
    """Return the page in Markdown."""
    columns = {name: data["columns"][name] for name in COLUMNS if name in data["columns"]}
    rows = [*SCENARIOS, *(OPTIM + name for name in data["optimizers"])]
    reasons = Reasons()
    cells = {
        row: [cell(columns[name]["rows"].get(row), reasons, IMPOSSIBLE.get((row, name))) for name in columns]
        for row in rows
    }
    own = {name: {row: f for row, f in c["rows"].items() if row not in cells} for name, c in columns.items()}
    counted = [
        Counter(result(columns[name]["rows"].get(row), IMPOSSIBLE.get((row, name))) for row in rows) for name in columns
    ]
    kinds = ("passed", "failed", "refused", "not run here", "impossible", "no test")
    lines = [INTRODUCTION]
    lines += table(
        ["backend", "day", *kinds, "machine", "Python", "libraries"],
        [
            [name, c["date"], *(str(n[kind]) for kind in kinds), c["machine"], c["python"],
             ", ".join(f"{library} {c['versions'][library]}" for library in LIBRARIES if library in c["versions"])]
            for (name, c), n in zip(columns.items(), counted, strict=True)
        ],
    )  # fmt: skip
    if absent := [name for name in COLUMNS if name not in columns]:
        lines += ["", f"Not run as a whole yet, and so without a column: {', '.join(absent)}."]
    lines += ["", "## Scenarios", ""]
    lines += table(["", *columns], [[words, *cells[row]] for row, words in SCENARIOS.items()])
    lines += ["", "## Optimizers", "", OPTIMIZERS, ""]
    lines += table(["`optim`", *columns], [[name, *cells[OPTIM + name]] for name in data["optimizers"]])
    own_lines = []
    for name, found in own.items():
        told = [[row, cell(outcome, reasons)] for row, outcome in sorted(found.items())]
        own_lines += ["", f"### {name}", "", *table(["test", "result"], told)] if told else []
    lines += ["", "## Reasons", ""]
    lines += [f"{number}. {text}" for number, text in enumerate(reasons.known, 1)]
    lines += ["", "## Tests of one backend", "", OWN, *own_lines]
    return "\n".join(lines) + "\n"


INTRODUCTION = """# What runs on which backend

`nox -s "backend(NAME)"` runs the tests of a backend and writes its column here, with the day, the machine and the
versions; this page is not edited by hand. One row is one or more tests (`tests/backends`), in all variants of the
backend:

- passed: all its tests passed; **failed**: those named did not.
- refused: by design. It ends with one clear message before anything is trained, which is tested.
- not run here, impossible: the number is that of the [reason](#reasons).
- no test: nothing in these sessions is about it.

A cell with more than one word says what is true of some variants each.
"""
OPTIMIZERS = """Every name that `--optim` accepts. Passed means: four steps or more changed the weights, on several
processes to those of one; in which variants and how near is in [every optimizer with every
backend](../../tr-dist/docs/optimizers.md)."""
OWN = """What has no counterpart on the other backends. Numbers are reasons, as above. Without its device, what passed
of `mps` and `cuda` ran on a substitute that computes on the CPU, or asks only what is chosen and refused."""
