"""Optimizers of other libraries, with plain states and checks; each needs its library, an extra of this package.

A loop of your own imports a class from the module of its library: `tr_optim.adapters.torchao.TorchAOAdamW8bit`. This
module imports a library, or says how to install it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from typing import Any

from torch.optim import Optimizer

from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.shards import sharded_parameters


def require(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: its full name.
        extra: the extra of this package that brings it.

    Raises:
        ImportError: it, or something that it needs, is not installed.
    """
    library = module.partition(".")[0]
    try:
        importlib.import_module(library)
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(library, extra, error) from error


def require_parts(library: str, parts: tuple[str, ...], extra: str) -> list[Any]:
    """Import modules of a library without running its `__init__`, which imports what they do not need.

    They are imported under names of their own: `import galore_torch` elsewhere stays what it is.

    Args:
        library: name of the package.
        parts: names of modules in it.
        extra: the extra of this package that brings it.

    Raises:
        ImportError: it, or something that the modules need, is not installed.
    """
    found = importlib.machinery.PathFinder.find_spec(library)
    if found is None or found.submodule_search_locations is None:
        raise _missing(library, extra, None)
    name = f"{__package__}._{library}"
    if name not in sys.modules:
        package = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None, is_package=True))
        package.__path__ = list(found.submodule_search_locations)
        sys.modules[name] = package
    try:
        return [importlib.import_module(f"{name}.{part}") for part in parts]
    except ImportError as error:
        raise _missing(library, extra, error) from error


def _missing(library: str, extra: str, error: ImportError | None) -> ImportError:
    lacks = "is not installed" if error is None or error.name == library else f"cannot be imported ({error})"
    return ImportError(f"this optimizer is that of {library}, which {lacks}; pip install 'tr-optim[{extra}]'")


class WholeParameters(Optimizer):
    """Base of optimizers that need whole parameters.

    Attributes:
        why_whole: the reason, in the message that refuses a part of one.
    """

    why_whole = ""

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does.

        Raises:
            ValueError: a parameter is a DTensor.
        """
        Optimizer.add_param_group(self, param_group)
        instead = f"{self.why_whole}; train with replicas (strategy='ddp'), or use adamw_torch"
        sharded_parameters(self.param_groups[-1]["params"], type(self).__name__, takes=False, instead=instead)
