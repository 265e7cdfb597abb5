"""Functions and methods that users set on a Trainer they have built: the next step, or evaluation, goes by them."""

from types import MethodType

import pytest
import torch
from habit_parts import Net, at_step, batches, by_hand, logged, rows
from torch import nn
from torch.utils.data import DataLoader, Subset

from tr_core import Trainer


def absolute(model, batch):
    return (model(batch["x"])["logits"] - batch["labels"]).abs().mean()


def loss_of_outputs(outputs, labels):
    return (outputs["logits"] - labels).abs().mean()


def test_a_loss_function_set_by_a_callback_acts_from_the_next_step(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.add_callback(at_step(2, lambda **_: setattr(trainer, "compute_loss_func", loss_of_outputs)))
    trainer.train()
    steps = batches(rows())
    expected = [*by_hand(other, steps[:2]), *by_hand(other, steps[2:], loss=absolute)]
    assert logged(trainer) == pytest.approx(expected)


def test_compute_loss_set_on_the_class_acts_on_trainers_that_exist(make_trainer, monkeypatch):
    trainer, other = make_trainer(), Net()
    usual = Trainer.compute_loss

    def doubled(self, model, inputs, *args, **kwargs):
        return 2 * usual(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(Trainer, "compute_loss", doubled)
    trainer.train()
    expected = by_hand(other, batches(rows()), loss=lambda model, batch: 2 * model(**batch)["loss"])
    assert logged(trainer) == pytest.approx(expected)


def test_training_step_bound_to_the_trainer_acts(make_trainer):
    trainer, usual, calls = make_trainer(gradient_accumulation_steps=2, max_steps=2), Trainer.training_step, []

    def training_step(self, model, inputs, num_items_in_batch=None):
        calls.append(sorted(inputs))
        return usual(self, model, inputs, num_items_in_batch)

    trainer.training_step = MethodType(training_step, trainer)
    trainer.train()
    assert calls == [["labels", "x"]] * 4


def test_training_step_wrapped_in_the_middle_of_a_run_acts_from_the_next_step(make_trainer):
    trainer, calls = make_trainer(), []
    usual = trainer.training_step

    def spy(model, inputs, *rest):
        calls.append(trainer.state.global_step)
        return usual(model, inputs, *rest)

    trainer.add_callback(at_step(2, lambda **_: setattr(trainer, "training_step", spy)))
    trainer.train()
    assert calls == [2, 3]


def test_a_collator_changed_for_a_prediction_and_put_back_acts_there_alone(make_trainer):
    def zeros(samples):
        return {"x": torch.zeros(len(samples), 4), "labels": torch.zeros(len(samples))}

    trainer = make_trainer()
    usual, trainer.data_collator = trainer.data_collator, zeros
    predicted = trainer.predict(rows(4)).predictions
    trainer.data_collator = usual
    with torch.no_grad():
        assert predicted == pytest.approx(trainer.model(torch.zeros(4, 4))["logits"].numpy())
        assert trainer.predict(rows(4)).predictions == pytest.approx(
            trainer.model(batches(rows(4), 4)[0]["x"])["logits"].numpy()
        )


def test_metrics_set_between_two_evaluations_are_those_of_the_second(make_trainer):
    trainer = make_trainer(eval_dataset=rows(4), compute_metrics=lambda prediction: {"first": 1.0})
    first = trainer.evaluate()
    trainer.compute_metrics = lambda prediction: {"second": float(prediction.predictions.shape[0])}
    second = trainer.evaluate()
    assert first["eval_first"] == 1.0
    assert second["eval_second"] == 4.0
    assert "eval_first" not in second


def test_preprocessing_of_logits_set_later_acts(make_trainer):
    trainer = make_trainer(eval_dataset=rows(4), compute_metrics=lambda p: {"sum": p.predictions.sum()})
    trainer.preprocess_logits_for_metrics = lambda logits, labels: torch.full_like(logits, 3.0)
    assert trainer.evaluate()["eval_sum"] == 12.0


def test_loaders_of_evaluation_and_prediction_set_by_functions_are_used(make_trainer):
    trainer = make_trainer(eval_dataset=rows(8))
    trainer.get_eval_dataloader = lambda eval_dataset=None: DataLoader(rows(4), batch_size=2)
    trainer.get_test_dataloader = lambda test_dataset: DataLoader(Subset(test_dataset, range(3)), batch_size=2)
    with torch.no_grad():
        expected = trainer.model(**batches(rows(4), 4)[0])["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    assert trainer.predict(rows(8)).predictions.shape == (3,)


def test_log_bound_to_the_trainer_can_drop_and_add_entries(make_trainer):
    def log(self, logs, *rest):
        logs.pop("grad_norm", None)
        Trainer.log(self, {**logs, "mine": 7.0}, *rest)

    trainer = make_trainer()
    trainer.log = MethodType(log, trainer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 4
    assert all(entry["mine"] == 7.0 and "grad_norm" not in entry for entry in steps)


def test_a_method_of_evaluation_set_by_a_function_is_called_by_the_run(make_trainer):
    trainer, calls = make_trainer(eval_dataset=rows(4), eval_strategy="steps", eval_steps=2), []
    usual = trainer.evaluate

    def evaluate(*args, **kwargs):
        calls.append(trainer.state.global_step)
        return usual(*args, **kwargs)

    trainer.evaluate = evaluate
    trainer.train()
    assert calls == [2, 4]


def test_prediction_step_set_by_a_function_makes_the_predictions(make_trainer):
    trainer = make_trainer()
    trainer.prediction_step = lambda model, inputs, loss_only, ignore_keys=None: (
        torch.tensor(5.0),
        inputs["x"][:, 0],
        inputs["labels"],
    )
    output = trainer.predict(rows(4))
    assert output.metrics["test_loss"] == 5.0
    assert output.predictions == pytest.approx(torch.stack([row["x"][0] for row in rows(4)]).numpy())


def test_smoothing_and_a_loss_function_set_later_use_the_loss_function(make_trainer):
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, labels=None):
            logits = self.layer(x)
            if labels is None:
                return {"logits": logits}
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"x": row["x"], "labels": torch.tensor(number % 3)} for number, row in enumerate(rows())]
    trainer = make_trainer(model=Classes(), train_dataset=data, label_smoothing_factor=0.1)
    trainer.compute_loss_func = lambda outputs, labels: outputs["logits"].square().mean()
    first = trainer.model(batches(data)[0]["x"], batches(data)[0]["labels"])["logits"].square().mean().item()
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(first)
