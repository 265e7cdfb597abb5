"""Options drawn at random: each combination trains as the plainest loop does, or is refused with a sentence.

`python tests/optimizer_combination_runs.py --number 500` does more of them.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too
from optimizer_combination_runs import CHOICES, REFUSALS, all_combinations, draw, problems_of, reason_to_refuse
from optimizer_settings import SETTINGS

FEW = pytest.param(30, 13, id="few")
SAMPLES = [FEW, pytest.param(130, 5, marks=pytest.mark.slow, id="many")]  # a number and a seed


@pytest.mark.parametrize(("number", "seed"), [FEW])
def test_the_sample_has_every_optimizer_every_choice_and_every_reason_to_refuse(number, seed):
    drawn = draw(number, seed)
    assert len({str(combination) for combination in drawn}) == number < len(all_combinations()) / 20
    assert {combination.setting for combination in drawn} == set(SETTINGS)
    for name, values in CHOICES.items():
        assert {getattr(combination, name) for combination in drawn} == set(values)
    assert {reason_to_refuse(combination) for combination in drawn} == {None, *REFUSALS}


@pytest.mark.parametrize(("number", "seed"), SAMPLES)
def test_a_combination_trains_as_the_plainest_loop_or_is_refused_in_words(number, seed):
    problems = problems_of(draw(number, seed))
    assert {str(combination): problem for combination, problem in problems.items()} == {}
