"""NEFTune's noise: what is the same if that is asked for, and what the reference does otherwise."""

import parity_data as data
import parity_models as models
import torch
from parity_callbacks import At
from parity_harness import OURS, REFERENCE, Scenario, run, same_tensors

from tr_optim import NEFTune

ALPHA = 5.0


class Draws(At):
    """Draw what the reference's data loader draws for a pass."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        torch.empty((), dtype=torch.int64).random_()


class Noise(At):
    def on_train_begin(self, args, state, control, *, model, **kwargs):
        self.noise = NEFTune(model, ALPHA, length="padded", seed=None).__enter__()

    def on_train_end(self, args, state, control, **kwargs):
        self.noise.__exit__()


def test_padded_noise_of_the_default_generator_makes_the_run_of_the_reference(tmp_path):
    reference = run(
        REFERENCE, Scenario(models.llama, data.tokens(), arguments={"neftune_noise_alpha": ALPHA}), tmp_path / "theirs"
    )
    scenario = Scenario(models.llama, data.tokens())
    clean = run(OURS, scenario, tmp_path / "clean")
    scenario.callbacks = lambda: [Noise("", 0), Draws("", 0)]
    ours = run(OURS, scenario, tmp_path / "ours")
    assert reference.losses != clean.losses
    assert ours.losses == reference.losses
    assert same_tensors(ours.weights, reference.weights)
