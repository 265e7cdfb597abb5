"""Values that a trial repeats, and the space that is searched where none is given."""

import pytest

from tr_core.search import default_hp_space
from tr_core.search.trial import FixedTrial


def test_the_default_space_is_that_of_the_reference():
    optuna = pytest.importorskip("optuna", reason="a search needs optuna")
    given = default_hp_space(optuna.create_study().ask())
    assert 1e-6 <= given["learning_rate"] <= 1e-4
    assert given["num_train_epochs"] in range(1, 6)
    assert given["seed"] in range(1, 41)
    assert given["per_device_train_batch_size"] in (4, 8, 16, 32, 64)


def test_a_rank_that_follows_knows_the_values_of_the_space_alone():
    trial = FixedTrial(1, {"x": 0.5}, "with several processes")
    assert trial.suggest_float("x", 0, 1) == 0.5
    with pytest.raises(ValueError, match="'y' is asked for after hp_space, which with several processes is too late"):
        trial.suggest_int("y", 0, 1)
