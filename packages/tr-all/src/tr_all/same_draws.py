"""Draw the same random numbers in both runs of a comparison, so that they hide no other difference.

Two Trainers draw in another order. Here each batch is loaded, and each forward pass begins, with seeds that follow from
nothing but the batch and the number of the pass.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

SEED = 20_000


class SameDraws:
    """The seeds of one run."""

    def __init__(self) -> None:
        self._loading: int | None = None
        self._passes = {True: 0, False: 0}
        self._models: set[int] = set()

    def seed_passes(self, model: Any) -> None:
        """Let each forward pass of a model begin with a seed of its own: one for those of training, one for others."""
        if id(model) not in self._models and hasattr(model, "register_forward_pre_hook"):
            self._models.add(id(model))
            model.register_forward_pre_hook(self._before_a_pass)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Seed each batch that is loaded in the block by the numbers of its samples, whichever Trainer loads it."""
        fetch, ours = import_module("torch.utils.data._utils.fetch"), import_module("tr_core.data.fetch")
        kinds = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
        names = ("swap_rng", "seed_host_generators", "separate_randomness")
        values = [(kind, "fetch", self._seeded(kind.fetch, ours.swap_rng, ours.restore_rng)) for kind in kinds]
        values += [(ours, name, self._with_our_seed(getattr(ours, name))) for name in names]
        with replaced(values):
            yield

    def _before_a_pass(self, model: Any, args: Any) -> None:
        self._passes[model.training] += 1
        import_module("torch").manual_seed(SEED * (2 + model.training) + self._passes[model.training])

    def _seeded(self, original: Callable[..., Any], swap: Callable[..., Any], restore: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def read(fetcher: Any, indices: Any) -> Any:
            fetcher.place = getattr(fetcher, "place", 0) + 1
            known = [index for index in indices if isinstance(index, int)] if hasattr(indices, "__iter__") else []
            self._loading = zlib.crc32(repr(known or fetcher.place).encode())
            aside = swap(self._loading)
            try:
                return original(fetcher, indices)
            finally:
                self._loading = None
                restore(aside)

        return read

    def _with_our_seed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seed: original(seed if self._loading is None else self._loading)


@contextmanager
def replaced(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes in a block, and put them back after it."""
    before = [(place, name, getattr(place, name)) for place, name, _ in values]
    try:
        for place, name, value in values:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
