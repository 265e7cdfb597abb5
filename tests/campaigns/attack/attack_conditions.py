"""Let runs meet conditions of the world: quotas, full, small and slow disks, clocks, places, very many of a thing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import failing_disk
from conditions_clock import clocks, numbers_used_again
from conditions_disk import full_for_a_while, quotas, slow_disks, small_disks
from conditions_places import changed_meanwhile, crowded, places
from conditions_shards import many_shards
from runner import Case, Options

WITH_THE_LIBRARY = (quotas, full_for_a_while, slow_disks, clocks)
WITHOUT = (small_disks, numbers_used_again, places, changed_meanwhile, crowded)


def cases(options: Options) -> Iterator[Case]:
    """Yield the conditions, each with all its runs."""
    for condition in (*(WITH_THE_LIBRARY if failing_disk.is_here() else ()), *WITHOUT):
        name = condition.__name__.replace("_", " ")
        yield Case(name, partial(condition, quick=options.quick), f"conditions: {name}")
    yield Case("many shards", many_shards, "conditions: many shards")
