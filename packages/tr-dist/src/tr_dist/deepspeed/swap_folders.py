"""Give this process folders of its own to swap to, and delete them."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr_dist.deepspeed.configuration import swap_paths


class SwapFolders:
    """Folders of one process, below those that a configuration names for offload to NVMe.

    DeepSpeed itself would use one for all runs, and empty it as a run starts. They are deleted by `remove`, when this
    object goes, and as the interpreter ends; a process that is killed leaves them behind.

    Args:
        configuration: of DeepSpeed.
        rank: of this process; part of the folders' names.
    """

    def __init__(self, configuration: Mapping[str, Any], rank: int) -> None:
        self._wanted, self._rank = swap_paths(configuration), rank
        self._made: dict[str, Path] = {}
        self.remove = weakref.finalize(self, _remove, self._made)

    def place(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration with this process's folders in it; they are made the first time.

        A module that was divided by one engine stays in its folders under the next.
        """
        placed = copy.deepcopy(configuration)
        for name, path in self._wanted.items():
            if name not in self._made:
                self._made[name] = Path(tempfile.mkdtemp(prefix=f"swapped-by-rank-{self._rank}-", dir=path))
            placed["zero_optimization"][name]["nvme_path"] = str(self._made[name])
        return placed


def check_swap_paths(configuration: Mapping[str, Any]) -> None:
    """Refuse folders that cannot be swapped to.

    Raises:
        ValueError: a folder is missing, cannot be written to, or is on a file system without direct access.
    """
    for name, path in swap_paths(configuration).items():
        setting = f"zero_optimization.{name}.nvme_path={path!r}"
        if not Path(path).is_dir():
            raise ValueError(f"{setting}: there is no such folder on this machine; make it, or name another")
        try:
            _write_directly(path)
        except OSError as error:
            raise ValueError(
                f"{setting}: cannot be swapped to ({error.strerror}); it has to be a folder that this process may "
                "write to, on a file system that is written past the page cache (O_DIRECT), which those in memory "
                "may not be"
            ) from None


def _write_directly(folder: str) -> None:
    """Open a file past the page cache, as DeepSpeed does, and delete it again."""
    descriptor, path = tempfile.mkstemp(prefix="swapped-", dir=folder)
    os.close(descriptor)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
        os.close(descriptor)
    finally:
        os.unlink(path)


def _remove(made: dict[str, Path]) -> None:
    for path in made.values():
        shutil.rmtree(path, ignore_errors=True)
