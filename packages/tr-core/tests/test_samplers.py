"""A grid is made of the values that a space asks for."""

import pytest

from tr_core.search.samplers import GridSampler


def test_a_grid_follows_a_space_that_depends_on_its_own_values():
    def conditional(trial):
        name = trial.suggest_categorical("optim", ["sgd", "adamw_torch"])
        return {"optim": name} | ({"weight_decay": trial.suggest_float("w", 0, 1, step=0.5)} if name == "sgd" else {})

    sampler = GridSampler(conditional, 20, None)
    found = [conditional(trial) for trial in iter(sampler.ask, None)]
    assert found == [{"optim": "sgd", "weight_decay": w} for w in (0, 0.5, 1)] + [{"optim": "adamw_torch"}]


def test_a_range_without_steps_needs_points_for_a_grid():
    def logarithmic(trial):
        return {"learning_rate": trial.suggest_float("x", 1e-4, 1e-2, log=True)}

    with pytest.raises(ValueError, match="'x' has no steps to make a grid of; give step=, choices, points="):
        GridSampler(logarithmic, 20, None)
    sampler = GridSampler(logarithmic, 20, 3)
    values = [logarithmic(trial)["learning_rate"] for trial in iter(sampler.ask, None)]
    assert values == pytest.approx([1e-4, 1e-3, 1e-2])
    even = GridSampler(lambda t: {"x": t.suggest_float("x", 0, 1)}, 20, 3)
    assert [trial.suggest_float("x", 0, 1) for trial in iter(even.ask, None)] == [0, 0.5, 1]
    whole = GridSampler(lambda t: {"x": t.suggest_int("x", 1, 100, log=True)}, 20, 3)
    assert [trial.suggest_int("x", 1, 100, log=True) for trial in iter(whole.ask, None)] == [1, 10, 100]
