"""A run over a loader of the user's own, killed after any step, goes on with the same samples and the same bits."""

import sys
from pathlib import Path

import pytest
import torch
from shared.cases import every_second

sys.path.insert(0, str(Path(__file__).parent))
from own_loaders import DRAWN, EPOCHS, IN_THIS_PROCESS, SAMPLERS, STEPS_AN_EPOCH, WITH_WORKERS, train

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls what torch drops

LAST = EPOCHS * STEPS_AN_EPOCH


def of_these_or_at_night_of_all(*steps):
    """Choose the steps after which a run is killed; a pass has six."""
    every = pytest.param(range(1, LAST), marks=pytest.mark.slow)
    return pytest.mark.parametrize("steps", [steps, every], ids=["some", "all"])


def assert_goes_on(kind, folder, steps, **changes):
    changes = {"max_steps": LAST} | changes if kind == "a stream" else changes
    samples, weights = train(kind, folder, save_strategy="steps", save_steps=1, **changes)
    assert len(samples) >= LAST
    is_ordered = "in order" in kind or kind in ("stateful", "stateful, noise of torch")
    assert (samples[:STEPS_AN_EPOCH] == samples[STEPS_AN_EPOCH:][:STEPS_AN_EPOCH]) == is_ordered
    for step in steps:
        resumed, after = train(kind, folder, resume=str(folder / f"checkpoint-{step}"), seed=99, **changes)
        assert resumed == samples[-len(resumed) :], step
        assert all(torch.equal(value, after[name]) for name, value in weights.items()), step


@of_these_or_at_night_of_all(5, 6, 8)
@pytest.mark.parametrize("kind", every_second(IN_THIS_PROCESS))
def test_a_run_killed_after_any_step_goes_on_bit_equal(kind, steps, tmp_path):
    assert_goes_on(kind, tmp_path, steps)


@pytest.mark.parametrize(
    "kind", ["workers", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*WITH_WORKERS][1:])]
)
def test_a_run_whose_loader_has_workers_goes_on_bit_equal(kind, tmp_path):
    assert_goes_on(kind, tmp_path, (3, 6, 8, 17))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow][: place % 4]) for place, kind in enumerate(DRAWN)]
)
def test_batches_go_on_wherever_their_generator_is_made_and_whenever_it_draws(kind, workers, tmp_path):
    assert_goes_on(f"{kind}, {workers} workers", tmp_path, (2, 6, 9))


@pytest.mark.parametrize("kind", ["torch, made and seeded in set_epoch", "NumPy, made in __iter__"])
def test_batches_drawn_ahead_of_their_steps_go_on(kind, tmp_path):
    """Workers read ahead: at the save the generator has drawn batches that no step has used."""
    assert_goes_on(f"{kind}, drawn batch by batch, 2 workers", tmp_path, (2, 9))


@pytest.mark.parametrize("made", ["in __init__", "and seeded in set_epoch", "in __iter__"])
def test_a_resumed_run_is_resumed_once_more(made, tmp_path):
    kind = f"torch, made {made}, drawn batch by batch, 0 workers"
    saving = {"save_strategy": "steps", "save_steps": 1}
    samples, weights = train(kind, tmp_path / "whole", **saving)
    train(kind, tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-7"), seed=99, **saving)
    for step in (9, 13):
        resumed, after = train(kind, tmp_path / "last", resume=str(tmp_path / "again" / f"checkpoint-{step}"), seed=7)
        assert resumed == samples[step:], step
        assert all(torch.equal(value, after[name]) for name, value in weights.items()), step


def test_a_generator_that_sampler_and_data_share_goes_on_where_both_have_left_it(tmp_path):
    assert_goes_on("a generator that sampler and data share", tmp_path, (2, 6, 9))


@of_these_or_at_night_of_all(6, 9)
@pytest.mark.parametrize(
    "kind",
    [
        *every_second(f"sampler: {kind}" for kind in SAMPLERS),
        "data with its own generator",
        "sampler: of a generator of NumPy, data with its own generator",
    ],
)
def test_a_run_over_a_loader_of_the_trainers_goes_on_with_generators_of_the_users(kind, steps, tmp_path):
    assert_goes_on(kind, tmp_path, steps)


def test_a_run_that_accumulates_gradients_goes_on_bit_equal(tmp_path):
    assert_goes_on("shuffled", tmp_path, (2, 3, 7), gradient_accumulation_steps=2)


def test_saving_changes_no_number(tmp_path):
    samples, weights = train("weighted", tmp_path / "a", save_strategy="steps", save_steps=1)
    others, after = train("weighted", tmp_path / "b")
    assert samples == others
    assert all(torch.equal(value, after[name]) for name, value in weights.items())
