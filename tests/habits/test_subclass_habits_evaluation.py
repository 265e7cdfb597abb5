"""Subclasses that evaluate, predict and log in their own way, on transformers' Trainer and on ours."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from habit_parts import rows
from subclass_parts import assert_equal, class_rows, run_alike, run_both

import tr_core

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def accuracy(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def test_predictions_are_classes_in_place_of_logits(tmp_path):
    class ChoosingTrainer:
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad(), self.compute_loss_context_manager():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            if prediction_loss_only:
                return loss.detach(), None, None
            return loss.detach(), outputs.logits.argmax(dim=-1), inputs["labels"]

    theirs, ours = run_both(
        tmp_path, ChoosingTrainer, classes=True, **EVALUATED,
        parts={
            "eval_dataset": lambda: class_rows(5, seed=1),
            "compute_metrics": lambda seen: {"right": float((seen.predictions == seen.label_ids).mean())},
        },
    )  # fmt: skip
    assert_equal(theirs, ours, but=("prediction_loss_only",))


def test_inputs_kept_by_the_prediction_step_are_counted_in_evaluate(tmp_path):
    class KeepingTrainer:
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            self.kept.append(inputs.pop("number", torch.zeros(0)))
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            self.kept = []
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            metrics[f"{metric_key_prefix}_number"] = (
                self.accelerator.gather_for_metrics(torch.cat(self.kept)).sum().item()
            )
            return metrics

    def numbered():
        return [{**row, "number": torch.tensor(index)} for index, row in enumerate(rows(5, seed=1))]

    theirs, ours = run_both(
        tmp_path, KeepingTrainer, use=lambda trainer: trainer.evaluate(), remove_unused_columns=False,
        parts={"eval_dataset": numbered},
    )  # fmt: skip
    assert_equal(theirs, ours, but=("prediction_loss_only",))
    assert ours.result["eval_number"] == 10


def test_two_sets_are_evaluated_one_after_the_other_and_averaged(tmp_path):
    class TwoSetsTrainer:
        def __init__(self, *args, sets=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.sets = sets

        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            merged = {}
            for name, data in self.sets.items():
                merged.update(super().evaluate(data, ignore_keys, f"{metric_key_prefix}_{name}"))
            merged["eval_mean"] = sum(merged[f"eval_{name}_loss"] for name in self.sets) / len(self.sets)
            self.log({"eval_mean": merged["eval_mean"]})
            return merged

    theirs, ours = run_both(
        tmp_path, TwoSetsTrainer, **EVALUATED, metric_for_best_model="mean", greater_is_better=False,
        build=lambda kind, parts: kind(**parts, sets={"a": rows(4, seed=1), "b": rows(3, seed=2)}),
        parts={"eval_dataset": lambda: rows(2, seed=3)},
    )  # fmt: skip
    assert_equal(theirs, ours)


def test_metrics_are_taken_away_during_the_loop_and_computed_after_it(tmp_path):
    class AfterwardsTrainer:
        def __init__(self, *args, post_process=None, **kwargs):
            super().__init__(*args, **kwargs)
            self.post_process = post_process

        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            loader = self.get_eval_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            try:
                output = self.evaluation_loop(
                    loader, description="Evaluation", prediction_loss_only=None, ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )  # fmt: skip
            finally:
                self.compute_metrics = compute_metrics
            metrics = self.compute_metrics(self.post_process(output))
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
            metrics.update(output.metrics)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    theirs, ours = run_both(
        tmp_path, AfterwardsTrainer, classes=True, **EVALUATED,
        build=lambda kind, parts: kind(**parts, post_process=lambda output: output),
        parts={"eval_dataset": lambda: class_rows(6, seed=1), "compute_metrics": accuracy},
    )  # fmt: skip
    assert_equal(theirs, ours)
    assert "eval_accuracy" in ours.history[2]


def test_a_loop_called_by_position_is_made_to_keep_its_predictions(tmp_path):
    class ForcingTrainer:
        def evaluation_loop(
            self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
        ):
            output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
            spread = float(output.predictions.max() - output.predictions.min())
            output.metrics.update({f"{metric_key_prefix}_spread": spread})
            return output

    run_alike(
        tmp_path, ForcingTrainer, classes=True, **EVALUATED, parts={"eval_dataset": lambda: class_rows(5, seed=1)}
    )


def test_predict_adds_to_what_super_returns(tmp_path):
    class RankingTrainer:
        def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
            output = super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
            order = np.argsort(output.predictions)
            return output._replace(predictions=order, metrics={**output.metrics, "test_first": int(order[0])})

    theirs, ours = run_both(tmp_path, RankingTrainer, use=lambda trainer: trainer.predict(rows(5, seed=1)))
    assert theirs.result.keys() == ours.result.keys()
    assert_equal(theirs, ours)


def test_logs_are_rounded_and_written_to_a_file_of_ones_own(tmp_path):
    class WritingTrainer:
        def log(self, logs, *args, **kwargs):
            logs = {name: round(value, 3) if isinstance(value, float) else value for name, value in logs.items()}
            if self.is_world_process_zero() and "loss" in logs:
                with Path(self.args.output_dir, "log.jsonl").open("a") as file:
                    file.write(json.dumps({**logs, "step": self.state.global_step}) + "\n")
            super().log(logs, *args, **kwargs)

    theirs, ours = run_both(tmp_path, WritingTrainer, **EVALUATED, parts={"eval_dataset": rows})
    assert_equal(theirs, ours, but=("args",))
    assert (ours.folder / "log.jsonl").read_text() == (theirs.folder / "log.jsonl").read_text()


def test_values_of_training_and_evaluation_are_kept_apart_by_the_mode_of_the_model(tmp_path):
    class ModesTrainer:
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.kept = {"train": defaultdict(list), "eval": defaultdict(list)}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            entropy = torch.distributions.Categorical(logits=outputs.logits).entropy().mean()
            kept = self.kept["train" if self.model.training else "eval"]
            kept["entropy"].append(self.accelerator.gather_for_metrics(entropy.detach()).mean().item())
            return (loss, outputs) if return_outputs else loss

        def log(self, logs, start_time=None):
            mode = "train" if self.model.training else "eval"
            means = {name: sum(values) / len(values) for name, values in self.kept[mode].items()}
            if mode == "eval":
                means = {f"eval_{name}": value for name, value in means.items()}
            super().log({**logs, **means}, start_time)
            self.kept[mode].clear()

    theirs, ours = run_both(
        tmp_path, ModesTrainer, classes=True, **EVALUATED, parts={"eval_dataset": lambda: class_rows(6, seed=1)}
    )
    assert_equal(theirs, ours, but=("start_time",))
    assert {"entropy", "eval_entropy"} <= {name for entry in ours.history for name in entry}


def test_metrics_and_logits_are_functions_of_the_subclass_given_to_super(tmp_path):
    class BoundTrainer:
        def __init__(self, *args, **kwargs):
            kwargs["compute_metrics"] = self.measure
            kwargs["preprocess_logits_for_metrics"] = self.choose
            self.measured = 0
            super().__init__(*args, **kwargs)

        def choose(self, logits, labels):
            return logits.argmax(dim=-1)

        def measure(self, seen):
            self.measured += 1
            return {"accuracy": float((seen.predictions == seen.label_ids).mean()), "number": self.measured}

    run_alike(tmp_path, BoundTrainer, classes=True, **EVALUATED, parts={"eval_dataset": lambda: class_rows(7, seed=1)})


def test_an_evaluation_from_a_step_stops_the_run(tmp_path):
    def patient(base):
        class PatientTrainer(base):
            best = float("inf")

            def training_step(self, model, inputs, num_items_in_batch=None):
                if self.state.global_step and self.state.global_step % 2 == 0:
                    loss = self.evaluate(metric_key_prefix="early")["early_loss"]
                    model.train()
                    if loss > self.best - 1.0:
                        self.control.should_training_stop = True
                    self.best = min(loss, self.best)
                return super().training_step(model, inputs, num_items_in_batch)

        return PatientTrainer

    theirs, ours = run_both(
        tmp_path, patient, learning_rate=0.01, num_train_epochs=4, parts={"eval_dataset": lambda: rows(4, seed=1)}
    )
    assert ours.trainer.state.global_step == theirs.trainer.state.global_step < 16
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def test_operations_are_not_counted(tmp_path):
    class UncountedTrainer:
        def floating_point_ops(self, inputs):
            return 0

        def num_examples(self, dataloader):
            return 2 * len(dataloader)

    theirs, ours = run_both(tmp_path, UncountedTrainer, use=lambda trainer: trainer.train().metrics["total_flos"])
    assert ours.result == theirs.result == 0
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def test_every_call_of_evaluate_is_timed_and_passed_on_as_it_is(tmp_path):
    class TimedTrainer:
        def evaluate(self, *args, **kwargs):
            self.model.eval()
            with torch.no_grad():
                metrics = super().evaluate(*args, **kwargs)
            metrics["eval_epochs"] = self.state.num_train_epochs
            return metrics

    theirs, ours = run_both(
        tmp_path, TimedTrainer, eval_strategy="epoch", num_train_epochs=2, load_best_model_at_end=True,
        save_strategy="epoch", parts={"eval_dataset": lambda: rows(4, seed=1)},
    )  # fmt: skip
    assert_equal(theirs, ours, but=("args", "kwargs"))
    assert len(ours.called("evaluate")) == 2


def test_an_own_loop_over_the_batches_takes_the_place_of_evaluate(tmp_path):
    class LoopTrainer:
        @torch.no_grad()
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            self.model.eval()
            losses = [
                self.compute_loss(self.model, self._prepare_inputs(batch)).item()
                for batch in self.get_eval_dataloader(eval_dataset)
            ]
            self.model.train()
            metrics = {f"{metric_key_prefix}_loss": sum(losses) / len(losses)}
            self.log(metrics)
            return metrics

    theirs, ours = run_both(tmp_path, LoopTrainer, **EVALUATED, parts={"eval_dataset": lambda: rows(6, seed=1)})
    # No event clears the flag there, so that the last evaluation is made again at the end of the epoch.
    *before, last, again, end = theirs.history
    assert last == again
    assert ours.history == [*before, last, end]
    assert all(torch.equal(value, theirs.weights[name]) for name, value in ours.weights.items())


def test_a_copy_of_the_evaluation_of_a_run_reports_to_a_search_that_is_not_there(tmp_path):
    def copying(base):
        return type("CopyingTrainer", (base,), {"_evaluate": transformers.Trainer._evaluate})

    parts = {"eval_dataset": lambda: class_rows(5, seed=1), "compute_metrics": accuracy}
    _, ours = run_alike(tmp_path, copying, classes=True, parts=parts, **EVALUATED)
    assert "eval_accuracy" in ours.history[2]


def test_a_copy_of_the_evaluation_loop_is_refused_at_what_is_not_here(make_trainer):
    class CopyingTrainer(tr_core.Trainer):
        evaluation_loop = transformers.Trainer.evaluation_loop

    with pytest.raises(AttributeError, match=r"_wrap_model is .* call super\(\)\.evaluation_loop, or override"):
        make_trainer(CopyingTrainer, eval_dataset=rows(4)).evaluate()
