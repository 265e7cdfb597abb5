"""Overrides are called as the reference calls them, and what they add has its effect."""

import pytest
import torch
from memory_checkpointer import MemoryCheckpointer
from small_models import Classifier, samples
from torch import nn
from torch.utils.data import DataLoader

from tr_core import Trainer, TrainerCallback
from tr_core.preflight import check

EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "rewards"}


class Adding(Trainer):
    """Adds to the entry that it is given, a better one with every step."""

    def log(self, logs, start_time=None):
        if "eval_loss" in logs:
            logs["eval_rewards"] = -float(self.state.global_step)
        super().log(logs, start_time)


class HandingOn(Trainer):
    """Hands on an entry of its own."""

    def log(self, logs, start_time=None):
        more = {"eval_rewards": -float(self.state.global_step)} if "eval_loss" in logs else {"more": 1}
        super().log({**logs, **more}, start_time)


class AddingCallback(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "eval_loss" in logs:
            logs["eval_rewards"] = -float(state.global_step)


@pytest.mark.parametrize(
    ("kind", "callbacks"), [(Adding, []), (HandingOn, []), (Trainer, [AddingCallback]), (Trainer, [])]
)
def test_what_an_override_of_log_adds_is_in_the_result_and_chooses_the_best(make_trainer, kind, callbacks):
    options = {**EVALUATION, "greater_is_better": False, "checkpointer": MemoryCheckpointer()}
    trainer = make_trainer(20, trainer_class=kind, callbacks=callbacks, eval_dataset=samples(8, 1), **options)
    if kind is Trainer and not callbacks:  # the control: nothing adds it
        with pytest.raises(ValueError, match="metric_for_best_model='rewards' will not be among the results"):
            trainer.train()
        return
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (-5.0, 5)
    assert trainer.evaluate()["eval_rewards"] == -5.0


def test_what_an_override_adds_at_the_end_is_in_the_result_of_the_training(make_trainer):
    assert make_trainer(8, trainer_class=HandingOn).train().metrics["more"] == 1


def test_a_value_that_an_override_rounds_for_the_log_is_whole_in_the_result(make_trainer):
    class Rounding(Trainer):
        def log(self, logs, start_time=None):
            super().log({name: round(value, 1) for name, value in logs.items()}, start_time)

    trainer = make_trainer(8, trainer_class=Rounding, eval_dataset=samples(8, 1))
    result = trainer.evaluate()["eval_loss"]
    assert round(result, 1) == trainer.state.log_history[-1]["eval_loss"] != result


def test_the_check_does_not_miss_a_metric_that_an_override_of_log_adds(make_trainer):
    options = {**EVALUATION, "greater_is_better": False, "checkpointer": MemoryCheckpointer()}
    trainer = make_trainer(20, trainer_class=Adding, eval_dataset=samples(8, 1), **options)
    assert "T601" not in [problem.code for problem in check(trainer).problems]


def test_overrides_may_have_their_parameters_in_any_order_or_by_name_alone(make_trainer):
    called = []

    class Own(Trainer):
        def evaluation_loop(self, dataloader, *, metric_key_prefix="eval", ignore_keys=None, description, **options):
            called.append((description, metric_key_prefix, dict(options)))
            return super().evaluation_loop(
                dataloader, description, metric_key_prefix=metric_key_prefix, ignore_keys=ignore_keys, **options
            )

        def evaluate(self, metric_key_prefix="eval", ignore_keys=None, eval_dataset=None):
            called.append(("evaluate", metric_key_prefix))
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

        def create_scheduler(self, *, num_training_steps, optimizer=None):
            called.append(("create_scheduler", num_training_steps))
            return super().create_scheduler(num_training_steps, optimizer)

        def create_optimizer_and_scheduler(self, *, num_training_steps):
            called.append(("create_optimizer_and_scheduler", num_training_steps))
            super().create_optimizer_and_scheduler(num_training_steps)

        def prediction_step(self, model, inputs, prediction_loss_only, *, ignore_keys=None):
            called.append("prediction_step")
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

        def training_step(self, model, inputs, num_items_in_batch=None):
            called.append("training_step")
            return super().training_step(model, inputs, num_items_in_batch)

        def compute_loss(self, model, inputs, *, num_items_in_batch=None, return_outputs=False):
            called.append("compute_loss")
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    data = {"one": samples(4, 1)}
    trainer = make_trainer(4, trainer_class=Own, eval_dataset=data, eval_strategy="epoch")
    trainer.train()
    assert called == [
        ("create_optimizer_and_scheduler", 1),
        ("create_scheduler", 1),
        "training_step",
        "compute_loss",
        ("evaluate", "eval"),
        ("evaluate", "eval_one"),
        ("Evaluation", "eval_one", {"prediction_loss_only": True}),
        "prediction_step",
        "compute_loss",
    ]
    called.clear()
    trainer.predict(samples(4, 1))
    assert called == [("Prediction", "test", {}), "prediction_step", "compute_loss"]
    assert [problem.message for problem in check(trainer).problems if problem.code in ("T305", "T604")] == []


def test_a_dict_of_training_data_is_for_the_subclass_that_makes_the_loader(make_trainer):
    class Mixing(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset["a"] + self.train_dataset["b"], batch_size=4)

    data = {"a": samples(8, 1), "b": samples(12, 2)}
    trainer = make_trainer(trainer_class=Mixing, train_dataset=data)
    assert trainer.train().global_step == 5
    assert check(make_trainer(trainer_class=Mixing, train_dataset=data)).problems == []
    with pytest.raises(TypeError, match="train_dataset is a dict of"):
        make_trainer(train_dataset=data)


class SavesAlone(Classifier):
    """Its method takes a folder and nothing else, as those of libraries that are not transformers."""

    def save_pretrained(self, folder, create_card=False):
        torch.save(nn.Module.state_dict(self), f"{folder}/own.pt")


def test_a_model_whose_save_pretrained_takes_a_folder_alone_writes_itself(make_trainer, tmp_path):
    trainer = make_trainer(8, model=SavesAlone())
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    saved = torch.load(tmp_path / "saved" / "own.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())


def test_it_is_not_asked_where_its_own_weights_are_not_whole(make_trainer, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    trainer = make_trainer(8, model=SavesAlone())
    whole = {name: torch.ones(3, 5) for name in trainer.model.state_dict()}
    monkeypatch.setattr(trainer.strategy, "full_state_dict", lambda model: whole)
    trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / "own.pt").exists()
    assert set(load_file(tmp_path / "saved" / "model.safetensors")) == set(whole)


def test_a_model_whose_save_pretrained_takes_the_state_is_given_it(make_trainer, tmp_path):
    given = []

    class Takes(Classifier):
        def save_pretrained(self, folder, **options):
            given.append(options)

    trainer = make_trainer(8, model=Takes())
    trainer.save_model(tmp_path / "saved")
    assert set(given[0]["state_dict"]) == set(trainer.model.state_dict())
