"""One bad batch, and values beside the loss: what the reference does, and what this Trainer can do."""

import math

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, run

pytestmark = pytest.mark.reference_fails


class Breaking(models.Mlp):
    """Gives a loss that is NaN for a batch with a sample that is marked."""

    def forward(self, x, labels=None):
        outputs = super().forward(torch.nan_to_num(x), labels)
        bad = x.isnan().any()
        return {name: value * torch.where(bad, math.nan, 1.0) for name, value in outputs.items()}


def one_bad_batch():
    rows = data.classes(20)
    rows.samples[9]["x"] = torch.full((5,), math.nan)
    return rows


def test_one_bad_batch_ends_the_reference_in_silence_and_can_be_skipped(tmp_path):
    scenario = Scenario(Breaking, one_bad_batch, arguments={"num_train_epochs": 1})
    reference = run(REFERENCE, scenario, tmp_path / "reference")
    assert not any(weight.isfinite().all() for weight in reference.weights.values())
    # Of the five steps at least the last is of weights that are lost.
    assert reference.losses[-1] == 0.0
    scenario.arguments["on_nonfinite"] = "skip"
    ours = run(OURS, scenario, tmp_path / "ours")
    assert all(weight.isfinite().all() for weight in ours.weights.values())
    skipped = [entry["skipped_steps"] for entry in ours.history if "loss" in entry]
    assert sorted(skipped) == [0, 0, 0, 0, 1]
    assert sum(map(math.isnan, ours.losses)) == 1


def test_a_dict_of_losses_from_compute_loss_is_an_error_there_and_logged_here(tmp_path):
    def with_parts(trainer_class):
        class Parts(trainer_class):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                parts = {"loss": outputs["loss"], "ce": outputs["loss"]}
                return (parts, outputs) if return_outputs else parts

        return Parts

    scenario = Scenario(models.Mlp, data.classes(), subclass=with_parts)
    with pytest.raises(TypeError, match="dict"):
        run(REFERENCE, scenario, tmp_path / "reference")
    ours = run(OURS, scenario, tmp_path / "ours")
    assert [entry["ce"] for entry in ours.history if "ce" in entry] == pytest.approx(ours.losses, rel=1e-7)


@pytest.mark.parametrize("side", [REFERENCE, OURS], ids=lambda side: side.name)
def test_a_callback_sees_the_loss_here_and_not_there(side, tmp_path):
    seen = []

    class Look(side.callback):
        def on_step_end(self, args, state, control, loss=None, **kwargs):
            seen.append(loss if loss is None else loss.item())

    outcome = run(side, Scenario(models.Mlp, data.classes(), callbacks=lambda: [Look()]), tmp_path)
    assert seen == ([None] * len(seen) if side is REFERENCE else outcome.losses)
    assert len(seen) == 10
