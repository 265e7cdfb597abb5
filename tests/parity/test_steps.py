"""Steps: which samples, in which order, how many to an update, and how long a run is."""

import parity_data as data
import parity_models as models
import torch
from parity_harness import OURS, REFERENCE, Scenario, run, same_tensors


# From Python 3.12 on a fork beside other threads warns; torch's own threads are idle here.
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
