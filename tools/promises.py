"""Hold what the READMEs promise to the tests that show it, and write the table of both.

`python tools/promises.py` prints what is wrong, with the lines that are missing ready to paste into
`tests/promises.toml`; `--write` writes `tests/promises.md`.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from named_tests import PACKAGES, ROOT, fault_of

LIST, PAGE = ROOT / "tests/promises.toml", ROOT / "tests/promises.md"
READMES = {"root": ROOT / "README.md"} | {f"tr-{name}": ROOT / f"packages/tr-{name}/README.md" for name in PACKAGES}
DESCRIPTION = "description"
HOW = f"""\
Every sentence and table row of a README is in {LIST.relative_to(ROOT)}, under the README's name, as one of
    "the text" = ["core/test_x.py::test_y", "crash::power"]   a promise, and what shows it: read the test before
    "the text" = {{ tests = [...], without_test = "why" }}      of which no test can show all; `tests` may be left out
    "the text" = "{DESCRIPTION}"                               nothing is promised
If a promise has no test: write one, or promise less. Then run `nox -s promises`, which writes
{PAGE.relative_to(ROOT)}."""
# A sentence ends before a space; after `...)` a small letter shows that it goes on.
END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+(?!\.)|(?<=[.!?][)`*])\s+(?![a-z])|(?<=[.!?]\*\*)\s+(?![a-z])")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")


def statements(text: str) -> list[str]:
    """Split a README into sentences and table rows, without code, headings and tables of files; each text once."""
    found = [
        piece for block in _blocks(text) for piece in ([block] if " | " in block else END_OF_SENTENCE.split(block))
    ]
    return list(dict.fromkeys(found))


def _blocks(text: str) -> Iterator[str]:
    """Yield paragraphs, items of lists and table rows, each on one line; the cells of a row with ` | ` between them."""
    paragraph: list[str] = []
    in_code = in_table = of_files = False
    for line in [*text.splitlines(), ""]:
        row = line.startswith("|") and not in_code
        ends = row or not line.strip() or line.lstrip().startswith(("#", "```")) or bool(ITEM.match(line))
        if paragraph and (ends or in_code):
            yield " ".join(LINK.sub(r"\1", " ".join(paragraph)).split())
            paragraph = []
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif row:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not in_table:
                of_files = cells[0] == "file"
            elif not of_files and not set(line) <= set("|-: "):
                yield LINK.sub(r"\1", " | ".join(cells))
        elif not in_code and line.strip() and not line.startswith(("#", "    ")):
            paragraph.append(ITEM.sub("", line) if ends else line)
        in_table = row


def entries() -> dict[str, dict[str, Any]]:
    """Read the list: for each README, what each of its texts rests on."""
    return tomllib.loads(LIST.read_text("utf-8"))


def texts() -> dict[str, list[str]]:
    """Read the READMEs."""
    return {name: statements(path.read_text("utf-8")) for name, path in READMES.items()}


def faults(listed: Mapping[str, Mapping[str, Any]], written: Mapping[str, list[str]]) -> list[str]:
    """Say what is wrong between the list and the READMEs, in lines; empty if nothing is."""
    lines: list[str] = [f"[{name}] is not the name of a README" for name in listed if name not in written]
    for name, found in written.items():
        of_readme = listed.get(name, {})
        gone = {text: value for text, value in of_readme.items() if text not in found}
        missing = [text for text in found if text not in of_readme]
        if missing:
            lines += ["", f"not in the list yet; paste below [{name}], and set what it rests on:"]
            lines += [line for text in missing for line in _line_to_paste(text, gone)]
        if gone:
            lines += ["", f"no longer in {READMES[name].relative_to(ROOT)}; remove below [{name}]:"]
            lines += [f"{quoted(text)} = ..." for text in gone]
        wrong = [fault for text, value in of_readme.items() for fault in _faults_of_value(text, value)]
        lines += [f"[{name}] {fault}" for fault in wrong]
    return [*lines, "", HOW] if lines else []


def _line_to_paste(text: str, gone: Mapping[str, Any]) -> list[str]:
    before = difflib.get_close_matches(text, gone, n=1, cutoff=0.6)
    if not before:
        return [f'{quoted(text)} = "{DESCRIPTION}"  # or [tests]']
    return [f"# was: {before[0]}", f"{quoted(text)} = {_as_toml(gone[before[0]])}  # whether they still show it"]


def _faults_of_value(text: str, value: Any) -> list[str]:
    if value == DESCRIPTION:
        return []
    parts = value if isinstance(value, dict) else {"tests": value}
    tests, why = parts.get("tests"), parts.get("without_test")
    if not set(parts) <= {"tests", "without_test"} or not (tests or why) or not isinstance(tests, list | None):
        return [f'{quoted(text)}: needs a list of tests, {{ without_test = "why" }} or "{DESCRIPTION}"']
    return [fault for test in tests or () if (fault := fault_of(test))]


def quoted(text: str) -> str:
    """Write a text as a TOML string."""
    return json.dumps(text, ensure_ascii=False)


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_as_toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def page(listed: Mapping[str, Mapping[str, Any]], written: Mapping[str, list[str]]) -> str:
    """Write the tables: a section for each README, promises without a test first."""
    sections, counts, all_tests = [], [], set()
    for name, found in written.items():
        promises = {text: value for text in found if (value := listed[name][text]) != DESCRIPTION}
        parts = {t: v if isinstance(v, dict) else {"tests": v, "without_test": ""} for t, v in promises.items()}
        rows = [(text, _cell(part)) for text, part in parts.items() if part.get("without_test")]
        without = len(rows)
        rows += [(text, _cell(part)) for text, part in parts.items() if not part.get("without_test")]
        tests = {test for part in parts.values() for test in part.get("tests", ())}
        all_tests |= tests
        readme = str(READMES[name].relative_to(ROOT))
        counts.append([readme, len(promises), without, len(tests), len(found)])
        sections.append(_table(f"## {readme}", ("promise", "rests on"), rows))
    promised, not_shown, sentences = (sum(row[column] for row in counts) for column in (1, 2, 4))
    counts.append(["all", promised, not_shown, len(all_tests), sentences])
    head = ("README", "promises", "not shown in full by tests", "tests and campaigns", "sentences and rows")
    return "\n".join([INTRODUCTION, _table("", head, counts), *sections])


def _cell(part: Mapping[str, Any]) -> str:
    why = [f"**{part['without_test']}**"] if part.get("without_test") else []
    return "<br>".join([*why, *(f"`{test}`" for test in part.get("tests", ()))])


INTRODUCTION = """\
# What each promise of the READMEs rests on

Written by `nox -s promises` from `promises.toml`; do not edit. A promise that no test shows, or not all of it, stands
first in its table, with why. `core/test_x.py` is packages/tr-core/tests/test_x.py, and so on (`tools/named_tests.py`);
`crash::power` is a campaign of `nox -s crash`, `attack::files` of `nox -s attack`, `fuzz::resumes` of `nox -s fuzz`,
`robustness::kills` a script of `nox -s robustness`, and `examples::translation` an example of `nox -s examples`, with
bounds for its results.
"""


def _table(heading: str, head: tuple[str, ...], rows: list[Any]) -> str:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in [head, ["---"] * len(head), *rows]]
    return "\n".join([*([heading, ""] if heading else []), *(f"| {' | '.join(row)} |" for row in cells), ""])


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong, or write the page if that is asked for; return the exit code."""
    write = "--write" in (sys.argv[1:] if arguments is None else arguments)
    listed, written = entries(), texts()
    if wrong := faults(listed, written):
        print("\n".join(wrong))
        return 1
    new = page(listed, written)
    if write:
        PAGE.write_text(new, "utf-8")
    elif not PAGE.is_file() or PAGE.read_text("utf-8") != new:
        print(f"{PAGE.relative_to(ROOT)} is not what the list says: run `nox -s promises` (or this with --write)")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
