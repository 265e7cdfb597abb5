"""Search at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tr_core.search.journal import TrialRecord, same_values
from tr_core.search.samplers import Space
from tr_core.search.trial import RandomTrial, Trial


class NumberedSampler:
    """Trials that follow from their numbers, so that an interrupted search goes on as if it had not been.

    Args:
        space: the search space.
    """

    settings: dict[str, Any]
    pruned: tuple[type[Exception], ...] = ()

    def __init__(self, space: Space) -> None:
        self._space = space
        self._next = 0

    def make(self, number: int) -> Trial | None:
        """Return the trial of a number, or None if there is none."""
        raise NotImplementedError

    def restore(self, records: Sequence[TrialRecord]) -> None:
        """Pass over the finished trials; see `Sampler`."""
        for record in records:
            trial = self.make(record.number)
            if trial is not None:
                self._space(trial)
            made = {} if trial is None else trial.params
            saved = {name: record.params.get(name) for name in made}  # a model_init may have asked for more
            if trial is None or not same_values(made, saved):
                raise ValueError(
                    f"trial {record.number} of the earlier search was made with {record.params}, and hp_space now "
                    f"gives {made}; go on with the space of then, which must depend on the trial alone"
                )
            if record.state != "running":
                self._next = max(self._next, record.number + 1)

    def ask(self) -> Trial | None:
        """Return the next trial; see `Sampler`."""
        trial = self.make(self._next)
        self._next += 1
        return trial

    def distributions(self, trial: Any) -> dict[str, str]:
        """Return nothing: the number tells it all."""
        return {}

    def report(self, trial: Any, step: int, value: float) -> bool:
        """Prune nothing."""
        return False

    def tell(self, trial: Any, record: TrialRecord) -> None:
        """Do nothing: no trial depends on another."""


class RandomSampler(NumberedSampler):
    """Trials at random, as `RandomTrial` draws them.

    Args:
        space: the search space.
        seed: seed of the search.
    """

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space)
        self._seed = seed
        self.settings = {"backend": "random", "seed": seed}

    def make(self, number: int) -> Trial:
        """Return the trial of a number."""
        return RandomTrial(number, self._seed)
