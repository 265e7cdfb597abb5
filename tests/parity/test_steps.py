"""Steps: which samples, in which order, how many to an update, and how long a run is."""

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, run, same_tensors


def test_a_plain_run_is_the_same(parity):
    parity(models.Linear, data.regression())


def test_a_model_with_a_norm_is_the_same(parity):
    parity(models.Mlp, data.classes())


def test_a_model_that_returns_a_tuple_is_the_same(parity):
    parity(models.TupleMlp, data.classes())


def test_a_frozen_layer_stays_frozen_in_both(parity):
    def half_frozen():
        model = models.Mlp()
        model.first.requires_grad_(False)
        return model

    _, ours = parity(half_frozen, data.classes(), weight_decay=0.1)
    assert ours.trainer.model.first.weight.grad is None


@pytest.mark.parametrize("count", [16, 17, 18, 3])
def test_a_short_last_batch_is_the_same(parity, count):
    parity(models.Mlp, data.classes(count))


@pytest.mark.parametrize("count", [16, 18])
def test_dropping_the_last_batch_is_the_same(parity, count):
    # The reference's samples a second count those that were dropped.
    parity(models.Mlp, data.classes(count), dataloader_drop_last=True, but=["rates"])


@pytest.mark.parametrize("accumulation", [2, 3, 7])
def test_accumulation_with_a_short_last_group_is_the_same(parity, accumulation):
    _, ours = parity(models.Mlp, data.classes(), gradient_accumulation_steps=accumulation)
    assert ours.trainer.state.max_steps == {2: 6, 3: 4, 7: 2}[accumulation]


def test_accumulation_with_a_dropped_last_batch_is_the_same(parity):
    parity(models.Mlp, data.classes(), gradient_accumulation_steps=3, dataloader_drop_last=True, but=["rates"])


@pytest.mark.parametrize("epochs", [0.5, 1.5, 1.8])
def test_a_fraction_of_an_epoch_is_the_same(parity, epochs):
    parity(models.Mlp, data.classes(), num_train_epochs=epochs, gradient_accumulation_steps=2)


@pytest.mark.parametrize("max_steps", [1, 3, 5, 12])
def test_max_steps_within_and_over_epochs_is_the_same(parity, max_steps):
    parity(models.Mlp, data.classes(), max_steps=max_steps)


def test_max_steps_inside_an_epoch_with_accumulation_is_the_same(parity):
    parity(models.Mlp, data.classes(), max_steps=5, gradient_accumulation_steps=2)


@pytest.mark.parametrize("arguments", [{"seed": 7}, {"data_seed": 11}, {"seed": 3, "data_seed": 5}])
def test_seeds_choose_the_same_order(parity, arguments):
    parity(models.Mlp, data.classes(), **arguments)


def test_the_sequential_order_is_the_same(parity):
    parity(models.Mlp, data.classes(), train_sampling_strategy="sequential")


# From Python 3.12 on a fork beside other threads warns; torch's own threads are idle here.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_worker_processes_give_the_same(parity):
    parity(models.Mlp, data.classes(), dataloader_num_workers=2, num_train_epochs=1)


@pytest.mark.parametrize("max_steps", [3, 5, 11])
def test_a_stream_that_begins_again_is_the_same(parity, max_steps):
    parity(models.Mlp, data.Stream(data.classes()), max_steps=max_steps)


def test_a_stream_with_accumulation_is_the_same(parity):
    # 16 samples are 4 micro-batches: no update is left open at the end of a pass, which the reference drops.
    parity(models.Mlp, data.Stream(data.classes(16)), max_steps=5, gradient_accumulation_steps=2)


def test_dropout_differs_only_by_what_the_reference_draws_for_its_loader(tmp_path):
    """Every pass of the reference's loader takes one number from the stream that dropout uses; ours takes none."""

    class Draws(OURS.callback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            torch.empty((), dtype=torch.int64).random_()

    scenario = Scenario(models.dropping_mlp, data.classes())
    reference = run(REFERENCE, scenario, tmp_path / "reference")
    scenario.callbacks = lambda: [Draws()]
    drawing = run(OURS, scenario, tmp_path / "ours")
    assert drawing.losses == reference.losses
    assert same_tensors(drawing.weights, reference.weights)
