"""What holds of every optimizer of tr-optim in a Trainer, by its arguments alone."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # in the processes of ranks too
from optimizer_combination_runs import (
    MAX_NORM,
    STEPS,
    Combination,
    ordinary,
    rows,
    trainer_of,
    updates_projections_at_once,
    weights_of,
)
from optimizer_settings import SETTINGS
from shared.callbacks import Stop, StopAt
from shared.results import logged

from tr_core import SingleDevice, Trainer, TrainerCallback
from tr_core.testing import check_in_backward
from tr_dist.testing import run_ranks
from tr_optim import AdaLomo, APOLLOAdamW, FiraAdamW, Lomo

IN_BACKWARD = [setting for setting in SETTINGS if setting.in_backward]
ACCUMULATING = [setting for setting in IN_BACKWARD if setting.accumulates]
PLAIN = Combination(SETTINGS[0], 1, False, "fp32", "none", False, 1, "trainer")


def trained(folder, setting, combination=PLAIN, *, resume=None, **changes):
    trainer = trainer_of(combination, setting, folder, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def distance(first, second):
    return (weights_of(first.model) - weights_of(second.model)).abs().max().item()


def tolerance_of(setting):
    """Return how far weights may be from those of another order of additions, after changes of some hundredths."""
    if "8bit" in setting.optim:
        return 1e-3  # a rounding error can become a step of 8 bits
    # A column's step size is a quotient of two norms of few numbers each, of which one may be a thousandth of the sums
    # that it is the rest of: 1e-5 on some processors, and ten times that as a margin.
    return 1e-4 if setting.optim.startswith("apollo_adamw") else 1e-6


def is_projecting(setting):
    return "optim_target_modules" in setting.options


@pytest.mark.parametrize("setting", [s for s in IN_BACKWARD if is_projecting(s)], ids=str)
def test_the_layerwise_form_ends_bit_equal_with_one_batch_a_step(tmp_path, setting):
    found, expected = trained(tmp_path, setting), trained(tmp_path, ordinary(setting))
    assert torch.equal(weights_of(found.model), weights_of(expected.model))
    assert logged(found, "loss") == logged(expected, "loss")


@pytest.mark.parametrize("setting", [s for s in IN_BACKWARD if s.way != "immediate"], ids=str)
def test_clipping_is_that_of_clip_grad_norm(tmp_path, setting):
    clipped = replace(PLAIN, clips=True)
    found, expected = trained(tmp_path, setting, clipped), trained(tmp_path, ordinary(setting), clipped)
    assert distance(found, expected) < 1e-6
    assert logged(found, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-6)
    if "apollo" not in setting.optim:  # which takes no notice of a gradient's size but in its moments
        assert distance(found, trained(tmp_path, setting)) > 1e-5


@pytest.mark.parametrize("setting", ACCUMULATING, ids=str)
def test_four_micro_batches_are_one_big_batch_also_where_bases_are_found(tmp_path, setting):
    found = trained(tmp_path, setting, replace(PLAIN, accumulation=4))
    assert distance(found, trained(tmp_path, setting)) < tolerance_of(setting)


@pytest.mark.parametrize("setting", [s for s in SETTINGS if not updates_projections_at_once(s)], ids=str)
def test_steps_that_are_not_finite_are_left_out(tmp_path, setting):
    """As an ordinary optimizer leaves them out; a new basis is due in the fourth."""
    ends = []
    for one in (setting, ordinary(setting)):
        trainer = trainer_of(PLAIN, one, tmp_path, on_nonfinite="skip")
        trainer.model.register_forward_hook(spoil)
        trainer.train()
        assert sum(logged(trainer, "skipped_steps")) == 2
        ends.append(weights_of(trainer.model))
    assert ends[0].isfinite().all()
    assert (ends[0] - ends[1]).abs().max() < tolerance_of(setting)


def spoil(model, args, outputs):
    return {**outputs, "loss": outputs["loss"] * (torch.inf if len(model.seen) in (2, 4) else 1.0)}


FEW = [s for s in IN_BACKWARD if str(s) in ("lomo", "adalomo", "galore_adamw_layerwise")]


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_a_step_that_is_not_finite_ends_the_run_on_request(tmp_path, setting):
    trainer = trainer_of(PLAIN, setting, tmp_path, on_nonfinite="raise")
    trainer.model.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="step 2: the loss is inf"):
        trainer.train()


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_hooks_are_off_after_training_however_it_ends(tmp_path, setting):
    done = trained(tmp_path, setting, max_steps=2)
    failing = trainer_of(PLAIN, setting, tmp_path, callbacks=[StopAt(2)])
    with pytest.raises(Stop):
        failing.train()
    for trainer in (done, failing):
        assert not any(p._post_accumulate_grad_hooks for p in trainer.model.parameters())
        assert type(trainer.strategy) is SingleDevice
        assert all(p.grad is None for p in trainer.model.parameters())


def projecting(kind, parameters):
    parameters = list(parameters)
    matrices, others = ([p for p in parameters if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return kind([{"params": matrices, "rank": 2, "update_proj_gap": 2}, {"params": others}], 0.1, mode="immediate")


OF_LOMO = ({}, {"clip_grad_norm": 0.1}, {"accumulate": "store"})
MADE = [
    *(partial(kind, lr=0.1, **options) for kind in (Lomo, AdaLomo) for options in OF_LOMO),
    *(partial(projecting, kind) for kind in (APOLLOAdamW, FiraAdamW)),
]


@pytest.mark.parametrize("make", MADE)
def test_what_a_loop_expects_of_an_optimizer_in_the_backward_pass_holds(make):
    check_in_backward(lambda model: make(model.parameters()))


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_an_optimizer_that_is_given_is_clipped_as_the_arguments_say(tmp_path, kind):
    def run(**options):
        made = trainer_of(replace(PLAIN, clips=True), SETTINGS[0], tmp_path)
        optimizer = kind(made.model.parameters(), lr=0.1, **options)
        Trainer(made.model, made.args, train_dataset=rows(), optimizers=(optimizer, None)).train()
        return weights_of(made.model)

    assert torch.equal(run(), run(clip_grad_norm=MAX_NORM))
    with pytest.raises(ValueError, match=r"built with clip_grad_norm=2, but its loop clips to 0\.2 \(max_grad_norm\)"):
        run(clip_grad_norm=2.0)


class Decays(TrainerCallback):
    """Tells the learning rate from how far a weight without a gradient shrinks in each step."""

    def __init__(self):
        self.weights = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append(model.unused.weight.detach().clone())

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(model.unused.weight.detach().clone())

    def rates(self, decay):
        pairs = zip(self.weights, self.weights[1:], strict=False)
        return [((1 - after / before).mean() / decay).item() for before, after in pairs]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_learning_rate_that_is_used_is_the_one_that_is_logged(tmp_path, setting):
    """As it shrinks a matrix in float64 whose gradient is zero."""
    decays = Decays()
    trainer = trainer_of(PLAIN, setting, tmp_path, callbacks=[decays], lr_scheduler_type="cosine", warmup_steps=2)
    model = trainer.model
    model.unused = torch.nn.Linear(8, 8, bias=False).double()
    forward = model.forward

    def with_zero(x, labels, index):
        outputs = forward(x, labels, index)
        outputs["loss"] = outputs["loss"] + (model.unused.weight * 0.0).sum()
        return outputs

    model.forward = with_zero
    trainer.train()
    rates = decays.rates(0.1)
    if setting.optim == "adalomo":  # whose rate is one of the size of the weights
        sizes = [weight.square().mean().sqrt().item() for weight in decays.weights]
        rates = [rate / size for rate, size in zip(rates, sizes, strict=False)]
    assert len(set(rates)) == STEPS
    assert rates == pytest.approx(logged(trainer, "learning_rate"), rel=1e-6, abs=1e-9)


def train_all(folder, settings, saves):
    """In ranks: train each and save, or go on with what one process has saved; return the weights."""
    ends = []
    for number, setting in enumerate(settings):
        combination = replace(PLAIN, ranks=2)
        at = f"{folder}/{number}"
        options = {"save_strategy": "steps", "save_steps": 1} if saves else {}
        resume = None if saves else f"{at}/checkpoint-3"
        trainer = trained(at if saves else f"{at}-on-ranks", setting, combination, resume=resume, **options)
        ends.append(weights_of(trainer.model))
        trainer.strategy.close()
    return ends


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_from_steps_before_and_with_a_new_basis(tmp_path):
    ranks = run_ranks(train_all, 2, str(tmp_path / "ranks"), IN_BACKWARD, True, timeout_s=200)
    for number, setting in enumerate(IN_BACKWARD):
        assert torch.equal(ranks[0][number], ranks[1][number])
        for step in (2, 3):
            saved = str(tmp_path / f"ranks/{number}/checkpoint-{step}")
            end = weights_of(trained(tmp_path / "again", setting, resume=saved).model)
            assert (end - ranks[0][number]).abs().max() < tolerance_of(setting), (str(setting), step)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two_ranks(tmp_path):
    alone = []
    for number, setting in enumerate(IN_BACKWARD):
        options = {"save_strategy": "steps", "save_steps": 3}
        alone.append(weights_of(trained(tmp_path / str(number), setting, **options).model))
    ranks = run_ranks(train_all, 2, str(tmp_path), IN_BACKWARD, False, timeout_s=200)
    for number, setting in enumerate(IN_BACKWARD):
        assert torch.equal(ranks[0][number], ranks[1][number])
        assert (alone[number] - ranks[0][number]).abs().max() < tolerance_of(setting), str(setting)
