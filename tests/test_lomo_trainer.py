"""LOMO and AdaLomo in a Trainer: all that holds of an ordinary optimizer holds of one without gradients."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too

from lomo_runs import Network, logged, train_as_rank, trained, trainer, weights_of
from shared.callbacks import Stop, StopAt
from shared.results import distance, nudged

from tr_core.preflight import check
from tr_core.testing import check_in_backward
from tr_dist.testing import run_ranks
from tr_optim import AdaLomo, Lomo

# The same updates with ordinary gradients: of gradient descent, and of the factored second moment.
ORDINARY = {
    "lomo": {"optim": "sgd"},
    "adalomo": {"optim": "adafactor", "optim_args": "scale_parameter=true"},
}
NAMES = sorted(ORDINARY)


def assert_close(found, expected, tolerance=1e-6):
    # Of weights above 1, two units in the last place more: sums are of another order.
    torch.testing.assert_close(weights_of(found), weights_of(expected), rtol=2**-22, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_run_is_that_of_the_ordinary_optimizer_with_schedule_decay_and_clipping(tmp_path, name, max_grad_norm):
    options = {"max_grad_norm": max_grad_norm, "lr_scheduler_type": "cosine"}
    found, expected = trained(tmp_path, optim=name, **options), trained(tmp_path, **ORDINARY[name], **options)
    assert_close(found, expected)
    mine, theirs = (logged(made, "loss", "grad_norm", "learning_rate") for made in (found, expected))
    assert mine["learning_rate"] == theirs["learning_rate"]
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert len(mine["grad_norm"]) == 20
    assert not max_grad_norm or max(mine["grad_norm"]) > max_grad_norm
    assert {group["weight_decay"] for group in found.optimizer.param_groups} == {0.1, 0.0}


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"accumulate": "store"}])
def test_what_a_loop_expects_of_an_optimizer_without_gradients_holds(kind, options):
    check_in_backward(lambda model: kind(model.parameters(), lr=0.1, **options))


@pytest.mark.parametrize("name", NAMES)
def test_tied_weights_in_reentrant_segments_are_updated_once(tmp_path, name):
    class AllInSegments(Network):
        def forward(self, tokens, labels):
            def segment(function, *inputs):
                return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=True)

            hidden = self.embedding(tokens)
            for _ in range(2):
                for layer in self.layers:
                    hidden = segment(layer, hidden)
            logits = segment(lambda h: self.head(h.mean(dim=1)), hidden)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def run(change=lambda model: model, **options):
        torch.manual_seed(3)
        return trained(tmp_path, model=change(AllInSegments()), max_steps=8, **options)

    expected = run(**ORDINARY[name])
    # A weight has eight updates, each divided by its own size: a rounding grows. Ten times what one does to all.
    spread = distance(run(nudged, **ORDINARY[name]), expected)
    assert_close(run(optim=name), expected, tolerance=max(1e-6, 10 * spread))


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_are_refused_before_the_first_step_with_what_to_do(tmp_path, name):
    made = trainer(tmp_path, optim=name, gradient_accumulation_steps=2)
    before = weights_of(made)
    with pytest.raises(
        ValueError,
        match=f"optim='{name}' with gradient_accumulation_steps=2: {name} applies and frees.*gradient_checkpointing",
    ):
        made.train()
    assert made.state.global_step == 0
    assert all(torch.equal(value, before[key]) for key, value in weights_of(made).items())


class Spoiling(Network):
    """Gives a loss that is not finite in some calls."""

    def __init__(self, bad):
        torch.manual_seed(5)
        super().__init__(dropout=0.0)
        self.bad, self.calls = bad, 0

    def forward(self, tokens, labels):
        outputs, self.calls = super().forward(tokens, labels), self.calls + 1
        outputs["loss"] = outputs["loss"] * (torch.inf if self.calls in self.bad else 1.0)
        return outputs


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_not_finite_ends_the_run_on_request(tmp_path, name):
    made = trainer(tmp_path, optim=name, model=Spoiling({3}), on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match="step 3: the loss is inf"):
        made.train()


def test_skipping_needs_the_optimizer_that_can(tmp_path):
    made = trainer(tmp_path, optim="lomo", optim_args="nonfinite=skip_tensor", on_nonfinite="skip")
    with pytest.raises(ValueError, match="on_nonfinite='skip' cannot leave out an update of Lomo"):
        made.train()


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_an_optimizer_that_is_given_is_clipped_as_the_arguments_say(tmp_path, kind):
    def run(**options):
        torch.manual_seed(1)
        model = Network(dropout=0.0)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        return trained(tmp_path, model=model, optimizers=(optimizer, None), max_grad_norm=0.5, max_steps=5)

    assert_close(run(), run(clip_grad_norm=0.5), 0)
    with pytest.raises(ValueError, match=r"built with clip_grad_norm=2, but its loop clips to 0\.5 \(max_grad_norm\)"):
        run(clip_grad_norm=2.0)


def test_hooks_are_gone_after_training_and_after_an_exception(tmp_path):
    made = trained(tmp_path, max_steps=2)
    assert not made.model.head.weight._post_accumulate_grad_hooks
    with pytest.raises(Stop):
        trainer(tmp_path, model=made.model, callbacks=[StopAt(2)]).train()
    assert not made.model.head.weight._post_accumulate_grad_hooks
    again = trained(tmp_path, model=made.model, max_steps=2)
    assert again.state.global_step == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_preflight_knows_of_no_gradients_and_changes_no_weight(tmp_path, name):
    made = trainer(tmp_path, optim=name, max_steps=5)
    before = weights_of(made)
    report = check(made)
    assert report.count("error") == 0, report
    assert all(torch.equal(value, before[key]) for key, value in weights_of(made).items())
    figures, layer = report.figures, made.model.layers[0].linear.weight
    assert figures["gradient_bytes"] == 2 * layer.nbytes
    made = trainer(tmp_path, optim=name, max_steps=5)
    made.train()
    held = sum(v.nbytes for state in made.optimizer.state.values() for v in state.values())
    assert figures["optimizer_bytes"] == held


def test_nothing_is_said_of_an_estimated_norm(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trained(tmp_path, max_steps=2, log_level="info")
    assert "estimate" not in caplog.text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_two_ranks_are_equal_bit_for_bit_and_one_process_with_all_data(tmp_path, name, clip):
    options = {"optim": name, "max_grad_norm": clip, "max_steps": 5, "dropout": 0.0}
    results = run_ranks(train_as_rank, 2, str(tmp_path / "ranks"), {**options, "per_device_train_batch_size": 2})
    (first, log, states), (second, _, other_states) = results
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    for mine, theirs in zip(states, other_states, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    alone, alone_log, _ = train_as_rank(str(tmp_path / "alone"), {**options, "per_device_train_batch_size": 4})
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-6)
    assert log["grad_norm"] == pytest.approx(alone_log["grad_norm"], rel=1e-5)
    assert log["learning_rate"] == alone_log["learning_rate"]
