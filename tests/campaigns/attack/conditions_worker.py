"""Do the attacks by conditions, in a process that has the disk that fails in it; a line of JSON for each group."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import conditions_clock
import conditions_disk
import conditions_places
import conditions_shards
import failing_disk
import torch
from attack_counts import WRONG_END, Count
from storage_stages import crash_training
from storage_worker import IMPORTED_LATE

WITH_THE_LIBRARY = (
    conditions_disk.quotas,
    conditions_disk.full_for_a_while,
    conditions_disk.slow_disks,
    conditions_clock.clocks,
)
WITHOUT = (
    conditions_disk.small_disks,
    conditions_clock.numbers_used_again,
    conditions_places.places,
    conditions_places.changed_meanwhile,
    conditions_places.crowded,
)


def main(root: Path, quick: bool) -> None:
    """Do all groups."""
    torch.set_num_threads(1)
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    with contextlib.redirect_stdout(io.StringIO()):
        crash_training.train(root / "warm")
    groups = [*(WITH_THE_LIBRARY if failing_disk.is_here() else ()), *WITHOUT]
    for group in groups:
        _tell(lambda folder, group=group: group(folder, quick), root / group.__name__)
    _tell(conditions_shards.many_shards, root / "shards")


def _tell(group: object, folder: Path) -> None:
    folder.mkdir()
    try:
        assert callable(group)
        count = group(folder)
    except Exception:
        count = Count(f"conditions: {folder.name}")
        count.wrong(WRONG_END, traceback.format_exc())
    print(json.dumps(vars(count)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), quick=sys.argv[2] == "quick")
