"""Methods and attributes of a Trainer that users call and read themselves, outside a run, between runs and after."""

import json
import threading
from pathlib import Path

import pytest
import torch
from habit_parts import (
    Net,
    assert_same,
    batches,
    by_hand,
    rows,
    stack,
    when,
)

from tr_core import TrainerState

# Parts of a step


def test_a_loop_by_hand_over_training_step_trains(make_trainer):
    trainer, other = make_trainer(), Net()
    optimizer = trainer.create_optimizer()
    losses = []
    for batch in trainer.get_train_dataloader():
        losses.append(trainer.training_step(trainer.model, batch).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(by_hand(other, batches(rows())))
    assert_same(trainer.model, other)


def test_compute_loss_called_by_hand_is_the_loss_of_the_batch(make_trainer):
    trainer, batch = make_trainer(), batches(rows())[0]
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss.item() == pytest.approx(Net()(**batch)["loss"].item())
    assert torch.equal(outputs["logits"], Net()(**batch)["logits"])


def test_prediction_step_called_by_hand_needs_no_evaluation(make_trainer):
    trainer, batch = make_trainer(), batches(rows())[0]
    loss, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    assert loss.item() == pytest.approx(Net()(**batch)["loss"].item())
    assert torch.equal(logits, Net()(**batch)["logits"])
    assert torch.equal(labels, batch["labels"])
    assert not logits.requires_grad


def test_an_evaluation_loop_called_by_hand_gives_metrics_and_no_log(make_trainer):
    trainer = make_trainer(eval_dataset=rows(4))
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Mine", metric_key_prefix="mine")
    assert output.metrics["mine_loss"] == pytest.approx(Net()(**stack(rows(4)))["loss"].item())
    assert output.num_samples == 4
    assert trainer.state.log_history == []


@pytest.mark.parametrize("event", ["on_micro_batch_end", "on_pre_optimizer_step"])
def test_a_gradient_that_a_failed_run_leaves_is_not_in_the_next(make_trainer, event):
    def fail(state, **_):
        if state.global_step == 1:
            raise ZeroDivisionError

    trainer, other = make_trainer(), Net()
    failing = when(**{event: fail})
    trainer.add_callback(failing)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.remove_callback(failing)
    trainer.train()
    by_hand(other, batches(rows())[:1])
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)


# States and events


def test_a_trainer_knows_whether_it_is_training(make_trainer):
    seen = []
    trainer = make_trainer(eval_dataset=rows(4))
    trainer.add_callback(when(on_step_end=lambda **_: seen.append(trainer.is_in_train)))
    trainer.add_callback(when(on_evaluate=lambda **_: seen.append(trainer.is_in_train)))
    trainer.train()
    trainer.evaluate()
    assert seen == [True] * 4 + [False]


def test_events_sent_by_hand_reach_the_callbacks(make_trainer):
    seen = []
    trainer = make_trainer(callbacks=[when(on_evaluate=lambda metrics, **_: seen.append(metrics))])
    trainer.fire("on_evaluate", metrics={"eval_loss": 1.0})
    assert seen == [{"eval_loss": 1.0}]


def test_an_entry_logged_by_hand_is_in_the_history_and_reaches_callbacks(make_trainer):
    seen = []
    trainer = make_trainer(callbacks=[when(on_log=lambda logs, **_: seen.append(dict(logs)))])
    trainer.log({"mine": 3.0})
    assert trainer.state.log_history == [{"mine": 3.0, "epoch": 0.0, "step": 0}]
    assert seen == [{"mine": 3.0, "epoch": 0.0}]


def test_a_state_set_by_hand_after_training_is_the_one_saved(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.train()
    trainer.state = TrainerState(global_step=99)
    trainer.save_state()
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text("utf-8"))["global_step"] == 99


# Evaluations


def test_an_evaluation_before_training_changes_no_weight_and_no_random_number(make_trainer):
    torch.manual_seed(3)
    expected = torch.rand(1)
    trainer = make_trainer(model=Net(dropout=0.5), eval_dataset=rows(4))
    torch.manual_seed(3)
    trainer.evaluate()
    assert torch.equal(torch.rand(1), expected)
    assert_same(trainer.model, Net())


def test_an_evaluation_in_compute_metrics_is_one_within_the_other(make_trainer):
    depths = []

    def metrics(prediction):
        if not depths:
            depths.append(1)
            inner.append(trainer.evaluate(rows(2), metric_key_prefix="inner")["inner_loss"])
        return {}

    inner = []
    trainer = make_trainer(eval_dataset=rows(4), compute_metrics=metrics)
    outer = trainer.evaluate()["eval_loss"]
    assert inner == pytest.approx([Net()(**stack(rows(2)))["loss"].item()])
    assert outer == pytest.approx(Net()(**stack(rows(4)))["loss"].item())


def test_can_return_loss_set_by_hand_gives_a_loss_without_labels(make_trainer):
    class Own(Net):
        def forward(self, x, target=None):
            return super().forward(x, x.sum(-1) if target is None else target)

    trainer = make_trainer(model=Own(), eval_dataset=[{"x": row["x"]} for row in rows(4)])
    assert "eval_loss" not in trainer.evaluate()
    trainer.label_names, trainer.can_return_loss = [], True
    expected = Own()(stack(rows(4))["x"])["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected)


# Tokenizers and files


class Tokenizer:
    def __init__(self, word):
        self.word = word

    def save_pretrained(self, folder):
        (Path(folder) / "word.txt").write_text(self.word)


def test_a_tokenizer_set_later_is_given_to_events_and_saved(make_trainer, tmp_path):
    seen, trainer = [], make_trainer(processing_class=Tokenizer("first"))
    trainer.processing_class = Tokenizer("second")
    trainer.add_callback(when(on_step_end=lambda processing_class, **_: seen.append(processing_class.word)))
    trainer.train()
    trainer.save_model(tmp_path / "final")
    assert seen == ["second"] * 4
    assert (tmp_path / "final" / "word.txt").read_text() == "second"


def test_a_run_in_a_thread_of_ones_own_trains(make_trainer):
    trainer, other = make_trainer(), Net()
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join(timeout=60)
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)


def test_the_default_type_changed_before_construction_is_that_of_new_layers_only(make_trainer):
    torch.set_default_dtype(torch.float64)
    try:
        trainer = make_trainer()
        trainer.train()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float64}
