"""Know the places that tests are named by in lists (`core/test_x.py::test_y`), and say what a name stands for."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("args", "log", "core", "ckpt", "optim", "dist", "all")
# The short name of a folder of tests, and where it is.
FOLDERS = {
    **{name: f"packages/tr-{name}/tests" for name in PACKAGES},
    **{
        name: f"tests/{name}"
        for name in (
            "backends",
            "habits",
            "kernels",
            "launching",
            "parity",
            "robustness",
            "trackers",
            "engines",
            "ecosystem",
            "report",
        )
    },
    "tests": "tests",
    "crash_tests": "tests/crash",
}
# Campaigns that are no pytest files: the file that lists them as the keys of a dict.
CAMPAIGNS = {
    "attack": "tests/attack/run.py",
    "crash": "tests/crash/run.py",
    "examples": "packages/tr-all/examples/run_all.py",
    "fuzz": "tests/fuzz/fuzz_families.py",
}


def fault_of(name: str) -> str | None:
    """Say why this is the name of no test, or return None.

    A test is `folder/file.py::function`, a parametrised one without its values, one in a class without the class. A
    campaign is `crash::power`, `attack::files`, `fuzz::resumes`; `robustness::kills` is a script of that folder,
    `examples::translation` an example whose results have bounds.
    """
    place, _, function = name.partition("::")
    if not function:
        return f"{name}: needs the form folder/file.py::test_name or campaign::name"
    if place in CAMPAIGNS:
        known = _keys_in(ROOT / CAMPAIGNS[place])
        return None if function in known else f"{name}: {CAMPAIGNS[place]} has {', '.join(sorted(known))}"
    if place == "robustness":
        return None if (ROOT / f"tests/robustness/{function}.py").is_file() else f"{name}: no such script"
    folder, _, file = place.partition("/")
    if folder not in FOLDERS:
        return f"{name}: the folder is one of {', '.join([*FOLDERS, *CAMPAIGNS])}"
    path = ROOT / FOLDERS[folder] / file
    if not path.is_file():
        return f"{name}: {path.relative_to(ROOT)} does not exist"
    if not function.startswith("test_") or function not in functions_in(path):
        return f"{name}: {path.relative_to(ROOT)} has no test {function}"
    return None


@functools.cache
def functions_in(path: Path) -> frozenset[str]:
    """Return the names of all functions of a file, those of its classes included."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@functools.cache
def _keys_in(path: Path) -> frozenset[str]:
    dicts = (n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Dict))
    return frozenset(k.value for d in dicts for k in d.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
