"""The table of habits in README.md names every test of this folder, and says of each whether it acts or is refused."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def read_table():
    """Return the rows of README.md: a file's name and a habit, and what becomes of it."""
    table, file = {}, ""
    for line in (HERE / "README.md").read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"## `(test_\w+\.py)`", line):
            file = heading[1]
        elif row := re.fullmatch(r"\| ([a-z0-9 ]+) \| (acts|refused) \|", line):
            table[file, "test_" + row[1].replace(" ", "_")] = row[2]
    return table


def read_tests():
    """Return the tests of every file but this one, with their sources."""
    found = {}
    for path in HERE.glob("test_*.py"):
        if path != Path(__file__):
            nodes = ast.parse(path.read_text("utf-8")).body
            tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
            found |= {(path.name, node.name): ast.unparse(node) for node in tests}
    return found


def test_the_table_has_a_row_for_every_habit_and_no_other():
    table, tests = read_table(), read_tests()
    assert sorted(table) == sorted(tests)
    assert len(table) >= 60
    refused = [habit for habit, verdict in table.items() if verdict == "refused"]
    silent = [name for name in refused if not re.search(r"pytest\.raises|errors", tests[name])]
    assert silent == []
    total = f"{len(table)} habits: {len(table) - len(refused)} act, {len(refused)} are refused."
    assert total in (HERE / "README.md").read_text("utf-8")
