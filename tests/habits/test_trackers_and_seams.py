"""Callbacks of transformers, own evaluation loops, two Trainers at once, and other habits around a run."""

import logging

import pytest
import torch
from habit_parts import Net, assert_same, at_step, logged, rows, stack
from transformers import EarlyStoppingCallback as TheirEarlyStopping
from transformers import PrinterCallback as TheirPrinter
from transformers import ProgressCallback as TheirProgress
from transformers import TrainerCallback as TheirCallback

from tr_core import Trainer


def test_a_callback_of_transformers_hears_the_events(make_trainer):
    class Steps(TheirCallback):
        def __init__(self):
            self.steps = []

        def on_step_end(self, args, state, control, **kwargs):
            self.steps.append(state.global_step)
            control.should_training_stop = state.global_step == 3
            return control

    steps = Steps()
    make_trainer(callbacks=[steps]).train()
    assert steps.steps == [1, 2, 3]


def test_early_stopping_of_transformers_stops_the_run(make_trainer):
    trainer = make_trainer(
        eval_dataset=rows(4), eval_strategy="steps", eval_steps=1, learning_rate=0.0, metric_for_best_model="loss",
        callbacks=[TheirEarlyStopping(2)], load_best_model_at_end=True, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3


def test_the_printer_of_transformers_that_is_removed_is_gone(make_trainer, capsys):
    trainer = make_trainer()
    for kind in (TheirPrinter, TheirProgress):
        trainer.remove_callback(kind)
    trainer.train()
    assert "'loss'" not in capsys.readouterr().out


def test_the_printer_of_transformers_that_is_added_prints_every_log(make_trainer, capsys):
    trainer = make_trainer()
    trainer.remove_callback(TheirPrinter)
    trainer.add_callback(TheirPrinter)
    trainer.train()
    assert capsys.readouterr().out.count("'loss'") == 4


def test_two_trainers_that_take_turns_do_not_disturb_each_other(make_trainer):
    first, second = make_trainer(model=Net(dropout=0.5)), make_trainer(model=Net(seed=2))
    alone = make_trainer(model=Net(seed=2))
    alone.train()
    first.add_callback(at_step(2, lambda **_: second.train()))
    first.train()
    assert logged(second) == logged(alone)
    assert first.state.global_step == 4
    assert_same(second.model, alone.model)


def test_an_evaluation_by_another_trainer_in_a_callback_is_of_its_own(make_trainer):
    judge = make_trainer(model=Net(seed=2), eval_dataset=rows(4))
    trainer, found = make_trainer(), []
    trainer.add_callback(at_step(2, lambda **_: found.append(judge.evaluate()["eval_loss"])))
    trainer.train()
    assert found == pytest.approx([Net(seed=2)(**stack(rows(4)))["loss"].item()])
    assert judge.state.global_step == 0


def test_an_overridden_evaluation_loop_called_by_keyword_gives_the_metrics(make_trainer):
    class Own(Trainer):
        def evaluation_loop(
            self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
        ):
            output = super().evaluation_loop(
                dataloader=dataloader, description=description, prediction_loss_only=prediction_loss_only,
                ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix,
            )  # fmt: skip
            output.metrics[f"{metric_key_prefix}_mine"] = 5.0
            return output

    trainer = make_trainer(Own, eval_dataset=rows(4), eval_strategy="steps", eval_steps=2, metric_for_best_model="mine")
    trainer.train()
    assert logged(trainer, "eval_mine") == [5.0, 5.0]
    assert trainer.state.best_metric == 5.0


def test_an_overridden_save_model_is_called_by_checkpoints_or_only_by_hand(make_trainer, tmp_path):
    calls = []

    class Own(Trainer):
        def save_model(self, output_dir=None, **rest):
            calls.append(output_dir)
            super().save_model(output_dir, **rest)

    trainer = make_trainer(Own)
    trainer.train()
    trainer.save_model(str(tmp_path / "mine"))
    assert calls == [str(tmp_path / "mine")]
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def test_the_level_of_the_root_logger_is_the_users_own(make_trainer):
    before = logging.getLogger().level
    make_trainer(log_level="debug").train()
    assert logging.getLogger().level == before


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection_around_a_run_finds_the_operation(make_trainer):
    class Broken(Net):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            outputs["loss"] = outputs["loss"] + (outputs["loss"] * 0).sqrt()
            return outputs

    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        make_trainer(model=Broken()).train()
