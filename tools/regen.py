"""Write every page, table and list that is generated from the code: `nox -s regen`.

What is measured is not: `bench`, `equality` and the sessions of the backends write their pages themselves.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import argument_reference
from package_list import PACKAGES, ROOT, Package
from tr_core.preflight.report import CODES


def generated() -> dict[Path, str]:
    """Return the text that each file is to have; of pages with words of their own, the tables are renewed."""
    found = {package.path / "api.txt": public_names(package) for package in PACKAGES}
    found[argument_reference.PAGE] = argument_reference.page()
    # Their tests write these from what they compare with.
    found[ROOT / "packages/tr-args/tests/flags.txt"] = "".join(_module("packages/tr-args/tests/test_help.py").lines())
    for page, test in (
        ("packages/tr-core/docs/hooks.md", "tests/parity/test_hooks.py"),
        ("packages/tr-dist/docs/optimizers.md", "tests/backends/test_optimizers.py"),
    ):
        found[ROOT / page] = with_tables((ROOT / page).read_text("utf-8"), [_module(test).table()])
    codes = ROOT / "packages/tr-core/docs/check-codes.md"
    found[codes] = with_tables(codes.read_text("utf-8"), tables_of_codes())
    return found


def public_names(package: Package) -> str:
    """Return the names in a package's `__all__`, a line each; its file is read, not imported."""
    body = ast.parse((package.source / "__init__.py").read_text("utf-8")).body
    names = [n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return "".join(f"{name}\n" for name in sorted(ast.literal_eval(names[0])))


def tables_of_codes() -> Iterable[str]:
    """Yield a table for each hundred of the codes of `trainer check`: the page has a heading for each."""
    for _, codes in itertools.groupby(CODES, key=lambda code: code[:2]):
        rows = [f"| {code} | {CODES[code][0]} | {CODES[code][1]} |" for code in codes]
        yield "\n".join(["| code | severity | what is the matter |", "|---|---|---|", *rows])


def with_tables(text: str, tables: Iterable[str]) -> str:
    """Return a page with its tables of the same first word in the head replaced by these, in their order.

    Raises:
        ValueError: the page has another number of such tables.
    """
    tables = list(tables)
    head = re.escape(tables[0].split(" | ")[0])
    there = re.compile(rf"(?m)^{head} \|.*\n(?:\|.*\n)+")
    if len(there.findall(text)) != len(tables):
        raise ValueError(f"the page has {len(there.findall(text))} tables that begin with {head!r}, not {len(tables)}")
    made = iter(tables)
    return there.sub(lambda _: next(made) + "\n", text)


def _module(path: str) -> ModuleType:
    """Import a test's file; what lies beside it can be imported by it."""
    file = ROOT / path
    specification = importlib.util.spec_from_file_location(f"regen_{file.stem}", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(file.parent))
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def main() -> None:
    """Write what changed, and say so."""
    for path, text in generated().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
