"""Read the first line of a module's docstring, without importing the module."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def summary(module: str) -> str:
    """Return the first line of a module's docstring, read from its source; empty if there is none.

    Neither the module nor its parent packages are imported: that may take seconds.

    Args:
        module: dotted name.
    """
    path = _source(module)
    if path is None:
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return docstring.partition("\n")[0].rstrip(".")


def _source(module: str) -> Path | None:
    top, *inner = module.split(".")
    spec = find_spec(top)  # for a top-level name only: for a dotted one it imports the parents
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*inner)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
