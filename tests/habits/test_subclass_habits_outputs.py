"""Subclasses whose outputs, logs and loaders have an odd form, on transformers' Trainer and on ours."""

import json

import numpy as np
import torch
from habit_parts import rows, stack
from subclass_parts import assert_equal, class_rows, run_alike, run_both, same
from torch.nn import functional
from torch.utils.data import DataLoader


def shapes(seen):
    """Describe what metrics are computed of."""
    parts = seen.predictions if isinstance(seen.predictions, tuple) else (seen.predictions,)
    return {"parts": len(parts), **{f"sum{number}": float(np.sum(part)) for number, part in enumerate(parts)}}


def evaluated(**parts):
    return {
        "classes": True,
        "eval_strategy": "epoch",
        "parts": {"eval_dataset": lambda: class_rows(6, seed=1), "compute_metrics": shapes, **parts},
    }


def test_outputs_are_a_dict_of_the_loss_and_two_tensors(tmp_path):
    class TwoTensorsTrainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.loss
            both = {"loss": loss, "logits": outputs.logits, "scores": outputs.logits.softmax(-1)}
            return (loss, both) if return_outputs else loss

    run_alike(tmp_path, TwoTensorsTrainer, **evaluated())


def test_outputs_are_a_tuple_whose_first_is_the_loss(tmp_path):
    class TupleTrainer:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, (outputs.loss, outputs.logits)) if return_outputs else outputs.loss

    run_alike(tmp_path, TupleTrainer, **evaluated())


def test_outputs_that_are_the_logits_alone_keep_their_first_row(tmp_path):
    def alone(base):
        class LogitsTrainer(base):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                labels = inputs.pop("labels")
                logits = model(**inputs).logits
                loss = functional.cross_entropy(logits, labels)
                return (loss, logits) if return_outputs else loss

        return LogitsTrainer

    def named(base):  # what is not a dict is taken there for a tuple whose first entry is the loss
        class NamedTrainer(alone(base)):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                loss, logits = super().compute_loss(model, inputs, return_outputs=True)
                return (loss, {"logits": logits}) if return_outputs else loss

        return NamedTrainer

    dropping, ours = run_both(tmp_path / "alone", alone, **evaluated())
    theirs, _ = run_both(tmp_path / "named", named, **evaluated())
    assert same(theirs.history, ours.history)
    assert not same(dropping.history, ours.history)


def test_predictions_of_unequal_widths_are_padded(tmp_path):
    class RaggedTrainer:
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
            width = 1 + int(labels[0])
            return loss, logits[:, :width], labels

    theirs, ours = run_both(tmp_path, RaggedTrainer, **evaluated())
    assert_equal(theirs, ours, but=("prediction_loss_only",))


def test_a_loss_of_each_row_is_returned_by_the_prediction_step(tmp_path):
    class RowsTrainer:
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                logits = model(x=inputs["x"]).logits
            losses = functional.cross_entropy(logits, inputs["labels"], reduction="none")
            return losses.mean(), losses[:, None], inputs["labels"]

    assert_equal(*run_both(tmp_path, RowsTrainer, **evaluated()), but=("prediction_loss_only",))


def test_no_loss_is_returned_by_the_prediction_step(tmp_path):
    class WithoutLossTrainer:
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                return None, model(x=inputs["x"]).logits, inputs["labels"]

    theirs, ours = run_both(tmp_path, WithoutLossTrainer, **evaluated())
    assert_equal(theirs, ours, but=("prediction_loss_only",))
    assert not any("eval_loss" in entry for entry in ours.history)


def test_an_older_copy_of_log_appends_to_the_history_itself(tmp_path):
    class CopiedLogTrainer:
        def log(self, logs, start_time=None):
            if self.state.epoch is not None:
                logs["epoch"] = round(self.state.epoch, 2)
            self.state.log_history.append({**logs, "step": self.state.global_step})
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    theirs, ours = run_both(
        tmp_path,
        CopiedLogTrainer,
        num_train_epochs=3,
        eval_strategy="epoch",
        parts={"eval_dataset": lambda: rows(4, seed=1)},
    )
    assert_equal(theirs, ours, but=("start_time",))


def test_entries_that_are_not_wanted_are_not_logged(tmp_path):
    class SilentTrainer:
        def log(self, logs, *args, **kwargs):
            if "train_runtime" in logs or self.state.global_step % 2:
                return
            logs.pop("grad_norm", None)
            super().log(logs, *args, **kwargs)

    theirs, ours = run_both(tmp_path, SilentTrainer)
    assert_equal(theirs, ours, but=("args",))
    assert [entry["step"] for entry in ours.history] == [2, 4]


def test_a_shuffled_loader_without_a_generator_draws_from_the_seed_of_the_run(tmp_path):
    class ShuffledTrainer:
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=2, shuffle=True, collate_fn=stack)

    run_alike(tmp_path, ShuffledTrainer, num_train_epochs=3)


def test_a_step_returns_a_loss_of_another_scale_than_it_trains(tmp_path):
    class ScaledTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            return loss * self.args.gradient_accumulation_steps

    run_alike(tmp_path, ScaledTrainer, gradient_accumulation_steps=2, num_train_epochs=2)


def test_a_loss_function_is_chosen_by_the_constructor_after_super(tmp_path):
    class ChosenLossTrainer:
        def __init__(self, *args, smoothing=0.1, **kwargs):
            super().__init__(*args, **kwargs)
            self.smoothing = smoothing
            self.compute_loss_func = self.smooth

        def smooth(self, outputs, labels, num_items_in_batch=None):
            losses = functional.cross_entropy(outputs.logits, labels, reduction="sum", label_smoothing=self.smoothing)
            return losses / (len(labels) if num_items_in_batch is None else num_items_in_batch)

    assert_equal(
        *run_both(tmp_path, ChosenLossTrainer, classes=True, gradient_accumulation_steps=2, num_train_epochs=2)
    )


def test_values_that_json_cannot_write_are_turned_by_log(tmp_path):
    class TurningTrainer:
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.log({"norms": [weight.grad.norm() for weight in model.parameters()], "loss_now": loss})
            return loss

        def log(self, logs, *args, **kwargs):
            plain = {}
            for name, value in logs.items():
                if isinstance(value, list):
                    value = torch.stack(value).mean()
                plain[name] = value.item() if isinstance(value, torch.Tensor) else value
            json.dumps(plain)
            super().log(plain, *args, **kwargs)

    assert_equal(*run_both(tmp_path, TurningTrainer), but=("args", "logs"))
