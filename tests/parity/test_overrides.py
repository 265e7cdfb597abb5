"""Subclasses: the documented methods can be overridden, and are called in the same way."""

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, assert_same, assert_same_metrics, build, run, warnings_of
from torch.nn import functional as F
from torch.utils.data import DataLoader

EVALUATION = data.classes(9, seed=8)


def collate(samples):
    return {
        "x": torch.stack([sample["x"] for sample in samples]),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def weighted_loss(trainer):
    class Weighted(trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs["logits"], labels, weight=torch.tensor([1.0, 2.0, 3.0]))
            return (loss, outputs) if return_outputs else loss

    return Weighted


def own_loader(trainer):
    class OwnLoader(trainer):
        def get_train_dataloader(self):
            generator = torch.Generator().manual_seed(1)
            return DataLoader(self.train_dataset, 3, shuffle=True, collate_fn=collate, generator=generator)

        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(self.eval_dataset, 3, collate_fn=collate)

    return OwnLoader


def own_optimizer(trainer):
    class OwnOptimizer(trainer):
        def create_optimizer(self):
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.7)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            if self.lr_scheduler is None:
                self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                    self.optimizer if optimizer is None else optimizer, lambda step: 1 - step / (2 * num_training_steps)
                )
            return self.lr_scheduler

    return OwnOptimizer


def own_step(trainer):
    class OwnStep(trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            return loss

    return OwnStep


def own_prediction(trainer):
    class OwnPrediction(trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return 2 * loss, logits, labels

    return OwnPrediction


def own_log(trainer):
    class OwnLog(trainer):
        def log(self, logs, start_time=None):
            super().log({**logs, "extra": 1.0}, start_time)

    return OwnLog


def own_decay(trainer):
    class OwnDecay(trainer):
        def get_decay_parameter_names(self, model):
            return ["last.weight"]

    return OwnDecay


def own_evaluation(trainer):
    class OwnEvaluation(trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return {**metrics, "eval_score": -metrics["eval_loss"]}

    return OwnEvaluation


@pytest.mark.parametrize(
    "subclass", [weighted_loss, own_loader, own_optimizer, own_step, own_prediction, own_decay, own_evaluation]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_override_acts_the_same(parity, subclass, accumulation):
    parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        subclass=subclass,
        weight_decay=0.3,
        eval_strategy="epoch",
        metric_for_best_model="score" if subclass is own_evaluation else None,
        save_strategy="best" if subclass is own_evaluation else "no",
        gradient_accumulation_steps=accumulation,
    )


def test_an_override_of_log_acts_the_same(parity):
    # The reference puts the epoch into the dict that it gives to `log`, and so loses it where that makes a copy.
    reference, ours = parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        subclass=own_log,
        eval_strategy="epoch",
        but=["events", "history"],
    )
    assert "epoch" not in reference.output.metrics
    assert ours.output.metrics["epoch"] == 2.0
    for expected, entry in zip(reference.history, ours.history, strict=True):
        assert_same_metrics(expected, entry)
        assert entry["extra"] == 1.0


@pytest.mark.parametrize("model", [models.Mlp, models.llama, models.gpt2, models.bert_classifier, models.t5])
def test_the_parameters_with_decay_have_the_same_names(tmp_path, model):
    names = []
    for side in (REFERENCE, OURS):
        trainer = build(side, Scenario(model), tmp_path / side.name).trainer
        names.append(set(trainer.get_decay_parameter_names(trainer.model)))
    # The reference also lists the other names of tied weights, which no optimizer asks for.
    assert names[1] == names[0] & set(dict(trainer.model.named_parameters()))
    assert (names[1] != names[0]) == (model in (models.gpt2, models.t5))


def test_callbacks_are_added_and_removed_in_the_same_way(tmp_path):
    found = []
    for side in (REFERENCE, OURS):

        class First(side.callback):
            pass

        class Second(side.callback):
            pass

        trainer = build(side, Scenario(models.Mlp), tmp_path / side.name).trainer
        mine = [First(), Second()]
        for callback in (mine[0], Second, mine[1]):
            with warnings_of(side):
                trainer.add_callback(callback)
        popped = trainer.pop_callback(Second)
        trainer.remove_callback(mine[0])
        left = [type(c).__name__ for c in trainer.callback_handler.callbacks if isinstance(c, First | Second)]
        found.append((type(popped).__name__, popped is mine[1], left, trainer.pop_callback(First)))
    assert found[1] == found[0] == ("Second", False, ["Second"], None)


def test_a_second_run_of_one_trainer_starts_from_the_trained_model_in_both(tmp_path):
    """With an optimizer that has no state; see the next test for one that has."""
    outcomes = []
    for side in (REFERENCE, OURS):
        outcome = run(side, Scenario(models.Mlp, data.classes(), arguments={"optim": "sgd"}), tmp_path / side.name)
        with warnings_of(side):
            outcome.output = outcome.trainer.train()
        outcomes.append(outcome)
    assert_same(*outcomes)


def test_a_second_run_begins_with_a_fresh_optimizer(tmp_path):
    """The reference goes on with the moments of the first run: what a run does depends on those before it."""
    for side in (REFERENCE, OURS):
        outcome = run(side, Scenario(models.Mlp, data.classes()), tmp_path / side.name)
        fresh = models.Mlp()
        fresh.load_state_dict(outcome.weights)
        with warnings_of(side):
            outcome.trainer.train()
        again = build(side, Scenario(models.Mlp, data.classes()), tmp_path / f"{side.name}-again", fresh)
        with warnings_of(side):
            again.trainer.train()
        assert (outcome.losses == again.losses) == (side is OURS)


def test_a_model_that_model_init_makes_is_trained_the_same(tmp_path):
    outcomes = []
    for side in (REFERENCE, OURS):

        def make():
            # Apart, as the reference's order of the data follows the last seed that torch was given.
            with torch.random.fork_rng():
                torch.manual_seed(5)
                return models.Mlp()

        with warnings_of(side):
            trainer = side.trainer(
                args=side.arguments(
                    output_dir=str(tmp_path / side.name), use_cpu=True, save_strategy="no", report_to="none"
                ),
                model_init=make,
                train_dataset=data.classes(),
            )
            trainer.train()
        outcomes.append(trainer)
    weights = [trainer.model.state_dict() for trainer in outcomes]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
