"""Import parts of a library that cannot be imported as a whole here."""

import importlib
import importlib.machinery
import importlib.util
import sys

import pytest


def modules_of(library, *names):
    """Import modules without the library's `__init__`, which imports what none of them uses; skip if it is not there.

    They get names of their own: `import galore_torch` elsewhere stays what it is.
    """
    found = importlib.machinery.PathFinder.find_spec(library)
    if found is None:
        pytest.skip(f"{library} is not installed")
    package = f"parity_{library}"
    if package not in sys.modules:
        empty = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(package, None, is_package=True))
        empty.__path__ = list(found.submodule_search_locations)
        sys.modules[package] = empty
    return [importlib.import_module(f"{package}.{name}") for name in names]
