"""Values that a trial suggests, at random or on a grid."""

import pytest

from tr_core.search import default_hp_space
from tr_core.search.trial import FixedTrial, RandomTrial


def test_the_default_space_is_that_of_the_reference():
    trial = RandomTrial(0, 1)
    given = default_hp_space(trial)
    assert 1e-6 <= given["learning_rate"] <= 1e-4
    assert given["num_train_epochs"] in range(1, 6)
    assert given["seed"] in range(1, 41)
    assert given["per_device_train_batch_size"] in (4, 8, 16, 32, 64)


def test_random_values_lie_in_their_ranges_and_reach_every_part():
    def drawn(suggest):
        return [suggest(RandomTrial(number, 0)) for number in range(400)]

    logs = drawn(lambda t: t.suggest_float("x", 1e-6, 1e-2, log=True))
    assert all(1e-6 <= value <= 1e-2 for value in logs)
    assert 0.4 < sum(value < 1e-4 for value in logs) / 400 < 0.6
    assert set(drawn(lambda t: t.suggest_int("x", 1, 4))) == {1, 2, 3, 4}
    assert set(drawn(lambda t: t.suggest_int("x", 2, 9, step=3))) == {2, 5, 8}
    assert set(drawn(lambda t: t.suggest_int("x", 1, 3, log=True))) == {1, 2, 3}
    assert set(drawn(lambda t: round(t.suggest_float("x", 0.0, 0.3, step=0.1), 9))) == {0.0, 0.1, 0.2, 0.3}
    assert set(drawn(lambda t: t.suggest_categorical("x", ["a", None, 3]))) == {"a", None, 3}
    floats = drawn(lambda t: t.suggest_float("x", -1, 1))
    assert all(-1 <= value <= 1 for value in floats)
    assert len(set(floats)) == 400


def test_a_value_depends_on_its_name_and_not_on_what_was_asked_before():
    one, other = RandomTrial(3, 0), RandomTrial(3, 0)
    one.suggest_float("a", 0, 1)
    assert one.suggest_float("b", 0, 1) == other.suggest_float("b", 0, 1)
    assert one.suggest_float("b", 0, 1) == one.params["b"]
    assert one.params["a"] != one.params["b"]


BAD_RANGES = [
    (lambda t: t.suggest_float("x", 2, 1), "'x' is to lie between 2 and 1; the first must not be greater"),
    (lambda t: t.suggest_float("x", 0, 1, log=True), "'x' from 0 has no logarithm; begin above 0"),
    (lambda t: t.suggest_float("x", 1, 2, step=0.1, log=True), "'x' has both log=True and step=0.1; leave one out"),
    (lambda t: t.suggest_float("x", 1, 2, step=-1), "'x' has step=-1; it must be above 0"),
    (lambda t: t.suggest_int("x", 1, 2.5), r"suggest_int\('x', 1, 2.5, step=1\) needs whole numbers"),
    (lambda t: t.suggest_categorical("x", []), r"suggest_categorical\('x', \[\]\) has nothing to choose from"),
    (lambda t: [t.suggest_int("x", 1, 2), t.suggest_int("x", 1, 3)], "'x' is asked for twice"),
]


@pytest.mark.parametrize(("suggest", "message"), BAD_RANGES)
def test_a_range_that_is_none_is_refused(suggest, message):
    with pytest.raises(ValueError, match=message):
        suggest(RandomTrial(0, 0))


def test_a_rank_that_follows_knows_the_values_of_the_space_alone():
    trial = FixedTrial(1, {"x": 0.5})
    assert trial.suggest_float("x", 0, 1) == 0.5
    with pytest.raises(ValueError, match="'y' is asked for after hp_space, which with several processes is too late"):
        trial.suggest_float("y", 0, 1)
