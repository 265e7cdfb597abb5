"""Faults of the reference in memory, precision and set-up, and that this Trainer does not have them."""

import json

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, build, run, run_both, same_tensors, warnings_of
from torch import nn

pytestmark = pytest.mark.reference_fails


def test_weights_are_what_they_were_after_an_evaluation_in_16_bits(tmp_path):
    """The reference leaves the model cast: rounded for good."""
    scenario = Scenario(models.llama, data.tokens(), data.tokens(7, seed=8), {"bf16_full_eval": True})
    found = {}
    for side in (REFERENCE, OURS):
        outcome = build(side, scenario, tmp_path / side.name)
        before = {name: value.clone() for name, value in outcome.weights.items()}
        with warnings_of(side):
            outcome.trainer.evaluate()
        found[side.name] = same_tensors(before, outcome.weights), outcome.trainer.model.dtype
    assert found == {"reference": (False, torch.bfloat16), "ours": (True, torch.float32)}


def test_a_model_of_float_inputs_can_be_evaluated_in_16_bits(tmp_path):
    """The reference casts the weights and not what they are multiplied with."""
    scenario = Scenario(models.Mlp, data.classes(), data.classes(9, seed=8), {"bf16_full_eval": True})
    reference, ours = (build(side, scenario, tmp_path / side.name) for side in (REFERENCE, OURS))
    with warnings_of(REFERENCE), pytest.raises(RuntimeError, match="must have the same dtype"):
        reference.trainer.evaluate()
    assert ours.trainer.evaluate()["eval_loss"] > 0


def test_activation_checkpointing_ends_with_training(tmp_path):
    scenario = Scenario(models.llama, data.tokens(), arguments={"activation_checkpointing": True})
    reference, ours = run_both(scenario, tmp_path)
    flags = [
        (
            outcome.trainer.model.is_activation_checkpointing,
            bool(outcome.trainer.model.model.embed_tokens._forward_hooks),
        )
        for outcome in (reference, ours)
    ]
    assert flags == [(True, True), (False, False)]


def test_the_configuration_that_is_saved_is_the_models_own(tmp_path):
    """The reference switches use_cache off in what it saves: a model loaded from there generates slowly."""
    found = []
    for side in (REFERENCE, OURS):
        outcome = run(
            side, Scenario(models.llama, data.tokens(), arguments={"save_strategy": "epoch"}), tmp_path / side.name
        )
        configs = sorted((tmp_path / side.name).rglob("config.json"))
        found.append({json.loads(path.read_text())["use_cache"] for path in configs})
        assert configs
        assert outcome.trainer.model.config.use_cache is (side is OURS)
    assert found == [{False}, {True}]


class Limited(models.Mlp):
    """Runs out of memory above two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        self.used.append(len(x))
        return super().forward(x, labels)


def test_a_smaller_batch_makes_the_same_steps(tmp_path):
    """The reference makes steps of fewer samples, so more of them, with the same learning rate."""
    asked = {"per_device_train_batch_size": 8, "num_train_epochs": 1}
    scenario = Scenario(Limited, data.classes(16), arguments={**asked, "auto_find_batch_size": True})
    reference, ours = run_both(scenario, tmp_path)
    whole = run(OURS, Scenario(models.Mlp, data.classes(16), arguments=asked), tmp_path / "whole")
    assert (whole.trainer.state.max_steps, ours.trainer.state.max_steps) == (2, 2)
    assert reference.trainer.state.max_steps == 8
    assert ours.losses == pytest.approx(whole.losses, rel=1e-6)
    for name, value in whole.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=1e-5, atol=1e-6)


def test_a_plain_module_can_be_checkpointed(tmp_path):
    class Deep(models.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            for block in self.blocks:
                x = block(x)
            return super().forward(x, labels)

    scenario = Scenario(Deep, data.classes(), arguments={"activation_checkpointing": True})
    with warnings_of(REFERENCE), pytest.raises(AttributeError, match="gradient_checkpointing_enable"):
        run(REFERENCE, scenario, tmp_path / "reference")
    checkpointed = run(OURS, scenario, tmp_path / "ours")
    scenario.arguments = {}
    assert same_tensors(run(OURS, scenario, tmp_path / "plain").weights, checkpointed.weights)
