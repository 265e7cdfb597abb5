"""Overrides of the hooks around a step: called as often as in the reference, with the same values, for the same run."""

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, assert_same, run, same_tensors
from torch.nn import functional as F
from transformers.trainer_pt_utils import nested_gather

EVALUATION = data.classes(9, seed=8)


def summed(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"]
    if num_items_in_batch is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def doubling(batches):
    return [{**batch, "x": batch["x"] * 2} for batch in batches]


def recording(calls):
    """Make a subclass that records what its hooks get, and changes the batches, their count and the losses."""

    def subclass(trainer):
        class Own(trainer):
            def get_batch_samples(self, epoch_iterator, num_batches, device):
                batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
                seen = [batch["x"].sum().item() for batch in batches]
                calls.append(("batches", num_batches, str(device), seen, None if count is None else int(count)))
                return doubling(batches), count

            def _get_num_items_in_batch(self, batch_samples, device):
                count = super()._get_num_items_in_batch(batch_samples, device)
                calls.append(("count", len(batch_samples), None if count is None else int(count)))
                return count if count is None else count * 2

            def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, epoch, *given, **named):
                due = (self.control.should_log, self.control.should_evaluate, self.control.should_save)
                calls.append(("after", float(tr_loss), float(grad_norm), trial, epoch, *due, sorted(named)))
                super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, *given, **named)
                calls.append(("logged", float(tr_loss)))

        return Own

    return subclass


def both(scenario, folder, calls):
    """Train with both sides; return the outcomes, and what the hooks of each recorded."""
    outcomes, recorded = [], []
    for side in (REFERENCE, OURS):
        calls.clear()
        outcomes.append(run(side, scenario, folder / side.name))
        recorded.append([*calls])
    return outcomes, recorded


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("logging_steps", [1, 3])
def test_the_hooks_of_a_step_are_called_with_the_same_values(tmp_path, accumulation, logging_steps):
    calls = []
    scenario = Scenario(
        models.Mlp,
        data.classes(),
        EVALUATION,
        {"gradient_accumulation_steps": accumulation, "eval_strategy": "steps", "eval_steps": 2},
        {"compute_loss_func": summed},
        subclass=recording(calls),
    )
    scenario.arguments["logging_steps"] = logging_steps
    outcomes, recorded = both(scenario, tmp_path, calls)
    assert_same(*outcomes)
    assert recorded[1] == recorded[0]
    assert {entry[0] for entry in recorded[0]} == {"batches", "count", "after", "logged"}


def test_batches_of_an_override_are_the_same_without_a_count(tmp_path):
    calls = []
    scenario = Scenario(
        models.Mlp, data.classes(), arguments={"gradient_accumulation_steps": 2}, subclass=recording(calls)
    )
    outcomes, recorded = both(scenario, tmp_path, calls)
    assert_same(*outcomes)
    assert recorded[1] == recorded[0]


def test_a_run_resumes_where_an_override_takes_its_batches(tmp_path):
    scenario = Scenario(
        models.Mlp,
        data.classes(),
        arguments={"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2},
        subclass=recording([]),
    )
    whole = run(OURS, scenario, tmp_path / "whole")
    for step in range(1, whole.trainer.state.max_steps):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        again = run(OURS, scenario, tmp_path / f"resumed-{step}", resume_from_checkpoint=checkpoint)
        assert same_tensors(whole.weights, again.weights), step
        assert again.losses == whole.losses


def copied(trainer):
    """Make a subclass that does itself what the reference does after a step, as some libraries do."""

    class Own(trainer):
        def _maybe_log_save_evaluate(
            self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
        ):
            if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
                total = nested_gather(tr_loss, self.args.parallel_mode).mean().item()
                tr_loss -= tr_loss
                steps = self.state.global_step - self._globalstep_last_logged
                rate = self._get_learning_rate() if learning_rate is None else learning_rate
                logs = {"loss": total / steps, "grad_norm": grad_norm.item(), "learning_rate": rate, "own": 1.0}
                self._total_loss_scalar += total
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(logs, start_time)
            if self.control.should_evaluate:
                metrics = self._evaluate(trial, ignore_keys_for_eval)
                self._determine_best_metric(metrics=metrics, trial=trial)
            if self.control.should_save:
                self._save_checkpoint(model, trial)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    return Own


@pytest.mark.parametrize("logging_steps", [1, 2, 3])
def test_an_override_may_log_evaluate_and_save_itself(parity, logging_steps):
    reference, ours = parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        subclass=copied,
        logging_steps=logging_steps,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )
    assert all("own" in entry for entry in ours.history if "loss" in entry)
    assert ours.output.training_loss == pytest.approx(reference.output.training_loss, rel=1e-6)


@pytest.mark.parametrize("side", [REFERENCE, OURS], ids=lambda side: side.name)
@pytest.mark.parametrize("logging_steps", [1, 2])
def test_an_override_that_logs_itself_logs_the_same_losses_after_a_resume(side, logging_steps, tmp_path):
    """What it takes out of the sum of losses is not in the checkpoint that it saves right after."""
    arguments = {"logging_steps": logging_steps, "save_strategy": "steps", "save_steps": 2}
    scenario = Scenario(models.Mlp, data.classes(), arguments=arguments, subclass=copied)
    whole = run(side, scenario, tmp_path / "whole")
    expected = run(REFERENCE, scenario, tmp_path / "expected")
    assert whole.losses == expected.losses
    for step in range(2, whole.trainer.state.max_steps, 2):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        again = run(side, scenario, tmp_path / f"resumed-{step}", resume_from_checkpoint=checkpoint)
        assert again.losses == expected.losses, step


def test_a_window_that_an_override_has_not_logged_yet_is_in_the_checkpoint(tmp_path):
    arguments = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 1}
    scenario = Scenario(models.Mlp, data.classes(), arguments=arguments, subclass=copied)
    whole = run(OURS, scenario, tmp_path / "whole")
    for step in range(1, whole.trainer.state.max_steps):
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        again = run(OURS, scenario, tmp_path / f"resumed-{step}", resume_from_checkpoint=checkpoint)
        assert again.losses == pytest.approx(whole.losses, rel=1e-6), step
        assert again.output.global_step == whole.output.global_step


def doubling_losses(*, zeroes):
    """Make a subclass that passes copies on, and zeroes the sum itself where it was logged, or does not."""

    def subclass(trainer):
        class Own(trainer):
            def _maybe_log_save_evaluate(self, tr_loss, grad_norm, *given, **named):
                last = self._globalstep_last_logged
                super()._maybe_log_save_evaluate(tr_loss * 2, grad_norm * 2, *given, **named)
                if zeroes and self._globalstep_last_logged != last:
                    tr_loss -= tr_loss

        return Own

    return subclass


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_a_loss_that_an_override_passes_on_is_for_one_log_alone(logging_steps, tmp_path):
    arguments = {"logging_steps": logging_steps}
    scenario = Scenario(models.Mlp, data.classes(), arguments=arguments, subclass=doubling_losses(zeroes=True))
    reference, ours = (run(side, scenario, tmp_path / side.name) for side in (REFERENCE, OURS))
    assert ours.history[:-1] == reference.history[:-1]


def test_a_copy_of_the_losses_that_is_passed_on_is_logged_once(tmp_path):
    """The reference zeroes the copy, and its losses add up."""
    ours, once = (
        run(OURS, Scenario(models.Mlp, data.classes(), subclass=doubling_losses(zeroes=zeroes)), tmp_path / str(zeroes))
        for zeroes in (False, True)
    )
    assert ours.losses == once.losses


def test_an_inherited_method_of_the_class_may_be_named_by_an_override(tmp_path):
    """As LLaMA-Factory does, to skip a class in between."""
    for side in (REFERENCE, OURS):

        def subclass(trainer):
            class Own(trainer):
                def get_batch_samples(self, *args, **kwargs):
                    return trainer.get_batch_samples(self, *args, **kwargs)

            return Own

        outcome = run(side, Scenario(models.Mlp, data.classes(), subclass=subclass), tmp_path / side.name)
        assert torch.isfinite(torch.tensor(outcome.losses)).all()


def test_checkpoints_go_to_the_folder_that_an_override_returns(tmp_path):
    def subclass(trainer):
        class Own(trainer):
            def __init__(self, *given, **named):
                super().__init__(*given, **named)
                self.part = "part"

            def _get_output_dir(self, trial):
                return f"{super()._get_output_dir(trial)}/{self.part}"

        return Own

    found = []
    for side in (REFERENCE, OURS):
        arguments = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1, "max_steps": 8}
        scenario = Scenario(models.Mlp, data.classes(), arguments=arguments, subclass=subclass)
        run(side, scenario, tmp_path / side.name)
        folder = tmp_path / side.name / "part"
        found.append(sorted(path.name for path in folder.iterdir() if path.name.startswith("checkpoint")))
        assert list((tmp_path / side.name).glob("checkpoint-*")) == []
    again = run(OURS, scenario, tmp_path / "ours", resume_from_checkpoint=str(folder / "checkpoint-8"))
    assert again.trainer.state.global_step == 8
    assert found == [["checkpoint-8"]] * 2
