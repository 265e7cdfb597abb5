"""The finder of a learning rate: what the rates of its run are, what it suggests, and what it refuses."""

import pytest
import torch

from tr_core.callbacks.learning_rate_finder import LearningRateFinder


class Bowl(torch.nn.Module):
    """The loss c w² / 2 of one weight, on which gradient descent with a rate above 2 / c diverges."""

    def __init__(self, curvature=10.0):
        super().__init__()
        self.curvature, self.weight = curvature, torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return {"loss": self.curvature / 2 * self.weight**2 + 0 * x.sum()}


ROWS = [{"x": torch.zeros(1)} for _ in range(400)]


@pytest.fixture
def find(make_trainer):
    def find(finder, **changes):
        options = {
            "model": Bowl(),
            "train_dataset": ROWS,
            "optim": "sgd",
            "max_steps": 100,
            "lr_scheduler_type": "cosine",
            "max_grad_norm": 0.0,
        }
        trainer = make_trainer(callbacks=[finder], **{**options, **changes})
        trainer.train()
        return trainer

    return find


def test_the_rate_grows_by_the_same_ratio_whatever_the_schedule_until_the_loss_breaks_out(find):
    finder = LearningRateFinder(1e-5, 10.0)
    trainer = find(finder, warmup_steps=10)
    rates = torch.tensor([entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(rates, torch.logspace(-5, 1, 100)[: len(rates)], rtol=1e-4, atol=0)
    assert 0.2 < rates[-1] < 5  # 2 / c is 0.2
    assert len(rates) < 100
    assert finder.rates == pytest.approx(rates[: len(finder.rates)].tolist())


@pytest.mark.parametrize("curvature", [0.1, 10.0, 1000.0])
def test_what_it_suggests_lies_below_the_rate_at_which_the_run_diverges_and_trains(find, make_trainer, curvature):
    finder = LearningRateFinder(1e-6, 1000.0)
    find(finder, model=Bowl(curvature))
    assert 0.005 < finder.suggestion * curvature / 2 < 0.5
    model = Bowl(curvature)
    rate = finder.suggestion
    constant = {"learning_rate": rate, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    make_trainer(model=model, train_dataset=ROWS, optim="sgd", max_steps=100, **constant).train()
    assert abs(model.weight.item()) < 1.5


def test_groups_keep_the_ratio_of_their_rates(find):
    first, second = torch.nn.Parameter(torch.tensor(3.0)), torch.nn.Parameter(torch.tensor(2.0))
    model = Bowl()
    model.weight, model.other = first, second
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.4}])
    find(LearningRateFinder(1e-5, 1e-2), model=model, optimizers=(optimizer, None))
    low, high = (group["lr"] for group in optimizer.param_groups)
    assert high == pytest.approx(4 * low)


def test_a_loss_that_still_falls_at_the_highest_rate_has_no_suggestion(find, caplog):
    finder = LearningRateFinder(1e-5, 1e-2)
    find(finder, log_level="info")
    assert finder.suggestion is None
    assert "the loss still fell at 0.01; end with a higher one" in caplog.text


def test_a_loss_that_never_falls_has_no_suggestion(find, caplog):
    finder = LearningRateFinder(1.0, 10.0)
    find(finder, log_level="info")
    assert finder.suggestion is None
    assert "the loss did not fall from 1 on; begin with a lower one" in caplog.text


def test_a_loss_that_is_not_finite_ends_the_run(find):
    class Breaking(Bowl):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            loss = super().forward(x)["loss"]
            return {"loss": loss if self.calls < 50 else loss * float("nan")}

    finder = LearningRateFinder(1e-4, 1e-1)
    trainer = find(finder, model=Breaking())
    assert trainer.state.global_step < 60
    assert finder.suggestion == pytest.approx(finder.rates[-1] / 10)


def test_arguments_that_do_not_log_each_step_or_save_the_weights_are_refused(saving):
    trainer = saving(save_strategy="epoch", logging_steps=5)
    trainer.add_callback(LearningRateFinder())
    with pytest.raises(ValueError, match=r"logging_steps=1, .*save_strategy='no'; given is logging_steps=5, save_str"):
        trainer.train()


def test_a_resumed_run_is_refused(saving):
    trainer = saving(save_strategy="steps", save_steps=5)
    trainer.train()
    trainer.args.save_strategy, trainer.args.logging_steps = "no", 1
    trainer.add_callback(LearningRateFinder())
    trainer.args.max_steps = 20
    with pytest.raises(ValueError, match="this run goes on from step 10; leave resume_from_checkpoint out"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (1e-3, float("inf"))])
def test_rates_out_of_range_are_refused(lowest, highest):
    with pytest.raises(ValueError, match=f"lowest={lowest} and highest={highest} must be positive"):
        LearningRateFinder(lowest, highest)
